"""A model as the planner and the step program see it: units, what they hold, and the order they run in."""

from dataclasses import dataclass

from shardwise.errors import InvalidModel
from shardwise.spec.law import Law
from shardwise.spec.step import StepTrace
from shardwise.spec.tensor import TensorSpec

ROOT = "(root)"
"""The name of the unit that holds what no other unit covers; no module path looks like it."""


ANNOUNCED, UNANNOUNCED, NONE = "announced", "unannounced", "none"


def most_demanding(*answers: str) -> str:
    """Of several calls of a unit, or of several ranks: how backward comes to it, so that all are served."""
    return max(answers, key=(NONE, ANNOUNCED, UNANNOUNCED).index)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """Modules that are communicated together. The name is the module's own path, or `(root)`.

    `backward` says how backward comes to it: `announced` by a gradient of its output; `unannounced`, where none of its
    outputs can be found, so that it has to be ready all the time; `none`, where no gradient flows through it.
    """

    name: str
    class_name: str
    backward: str = ANNOUNCED
    params: tuple[TensorSpec, ...] = ()
    buffers: tuple[TensorSpec, ...] = ()

    def __hash__(self) -> int:
        # Not over all it holds: units are keys of caches, and nearly always the very same object.
        return hash((self.name, self.class_name, len(self.params)))

    @property
    def num_params(self) -> int:
        return sum(param.num_elements for param in self.params)

    @property
    def param_bytes(self) -> int:
        return sum(param.num_bytes for param in self.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The units of a model, the root first, and the order in which one forward calls them.

    Invariants, checked here: names are unique; the root is there; every parameter and buffer is
    in exactly one unit; the call order names units. A unit that is called twice is listed twice.

    seq          the length of a sample (tokens) that the traces' laws are asked for; None where it plays no part
    batch_bytes  what the caller holds of a batch
    traces       a step in each way that was traced; without any, only states can be planned
    """

    name: str
    units: tuple[UnitSpec, ...]
    call_order: tuple[str, ...]
    seq: int | None = None
    batch_bytes: Law | None = None
    traces: tuple[StepTrace, ...] = ()

    def __post_init__(self) -> None:
        names = [unit.name for unit in self.units]
        if not names or names[0] != ROOT:
            raise InvalidModel(f"{self.name}: the first unit must be {ROOT}")
        if len(set(names)) != len(names):
            raise InvalidModel(f"{self.name}: two units have one name")
        seen: set[str] = set()
        for unit in self.units:
            for tensor in (*unit.params, *unit.buffers):
                for path in (tensor.name, *tensor.aliases):
                    if path in seen:
                        raise InvalidModel(f"{self.name}: {path} is in two units")
                    seen.add(path)
        for name in self.call_order:
            if name not in names:
                raise InvalidModel(f"{self.name}: the call order names {name}, which is no unit")

    def __hash__(self) -> int:
        # Not over all it holds: specs are keys of caches, and nearly always the very same object.
        return hash((self.name, self.seq, len(self.units), len(self.traces)))

    @property
    def num_params(self) -> int:
        return sum(unit.num_params for unit in self.units)

    @property
    def param_bytes(self) -> int:
        return sum(unit.param_bytes for unit in self.units)

    def trace(self, *, computes_in: str, recompute: str) -> StepTrace | None:
        """The trace of a step that computes and recomputes so, if there is one."""
        for trace in self.traces:
            if trace.computes_in == computes_in and trace.recompute == recompute:
                return trace
        return None

    def unit(self, name: str) -> UnitSpec:
        """The unit of that name."""
        for unit in self.units:
            if unit.name == name:
                return unit
        raise KeyError(name)
