"""A model as the planner and the step program see it: its units, their tensors, and the order of calls."""

from dataclasses import dataclass

from shardwise.errors import InvalidModel
from shardwise.spec.law import Law
from shardwise.spec.step import StepTrace
from shardwise.spec.tensor import TensorSpec

ROOT = "(root)"
"""The name of the unit that holds what no other unit covers; no module path looks like it."""

LARGE_ROOT_LAYER = 2**26
"""Least number of parameters of an embedding or a head that the rule `auto` takes out of the root: 128 MiB in bf16. In
the root it would stay gathered from forward to the end of backward; of a smaller one that costs less than a unit."""

ANNOUNCED, UNANNOUNCED, NONE = "announced", "unannounced", "none"


def most_demanding(*answers: str) -> str:
    """Combine the `backward` of several calls of a unit, or of several ranks, into the one that serves all."""
    return max(answers, key=(NONE, ANNOUNCED, UNANNOUNCED).index)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """Modules that are communicated together. The name is the module's path, or `(root)`.

    `backward` says how the unit notices its backward: `announced` by a gradient of its output; `unannounced` if none of
    its outputs can be found, so that it must be ready all the time; `none` if no gradient flows through it.

    `from_root`: a large embedding or head that the rule `auto` has taken out of the root. It is one operation, so it is
    no CUDA graph; the loss comes after it, so it is freed before backward; and its parameters may be read outside of
    its own forward wherever those of the root may.
    """

    name: str
    class_name: str
    backward: str = ANNOUNCED
    from_root: bool = False
    params: tuple[TensorSpec, ...] = ()
    buffers: tuple[TensorSpec, ...] = ()

    def __hash__(self) -> int:
        # Not over all fields: units are cache keys, and nearly always the same object.
        return hash((self.name, self.class_name, len(self.params)))

    @property
    def num_params(self) -> int:
        return sum(param.num_elements for param in self.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The units of a model, the root first, and the order in which one forward calls them.

    Invariants, checked here: names are unique; the first unit is the root; every parameter and buffer is in exactly one
    unit; the call order names units. A unit that is called twice is listed twice.

    seq          tokens per sample at which the laws are evaluated; None for models whose samples have no length
    lengths      of batches in their order, which then begins again, if they differ; laws are evaluated at the longest
    batch_bytes  the caller's batch
    traces       one step per traced way of computing; without any, only states can be planned
    """

    name: str
    units: tuple[UnitSpec, ...]
    call_order: tuple[str, ...]
    seq: int | None = None
    lengths: tuple[int, ...] = ()
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
        # Not over all fields: specs are cache keys, and nearly always the same object. But one with other traces must
        # not collide: to tell the two apart, all of their units would be compared at every look.
        ways = tuple((trace.computes_in, trace.recompute) for trace in self.traces)
        return hash((self.name, self.seq, self.lengths, len(self.units), ways))

    @property
    def num_params(self) -> int:
        return sum(unit.num_params for unit in self.units)

    def trace(self, *, computes_in: str, recompute: str) -> StepTrace | None:
        """Return the trace of this way of computing, or None."""
        found = (one for one in self.traces if (one.computes_in, one.recompute) == (computes_in, recompute))
        return next(found, None)

    def unit(self, name: str) -> UnitSpec:
        for unit in self.units:
            if unit.name == name:
                return unit
        raise KeyError(name)
