"""A model as the planner and the step program see it: its units, their tensors, and the order of calls."""

from dataclasses import dataclass, replace
from math import prod

from shardwise.base.errors import InvalidModel
from shardwise.base.vocabulary.dtypes import BYTES_PER_ELEMENT
from shardwise.program.spec.step import Law, StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One parameter or buffer.

    name        full path in the model; `aliases`: the other paths of a tied tensor
    trainable   False for buffers and frozen parameters
    switched    frozen or thawed after the model was prepared; the tensor stays in the buffer it was put into then
    persistent  False for buffers that are not saved
    keep_fp32   computes in fp32 under every precision (BatchNorm, whose statistics are fp32)
    linear      the weight of one nn.Linear
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    switched: bool = False
    persistent: bool = True
    keep_fp32: bool = False
    linear: bool = False
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in BYTES_PER_ELEMENT:
            raise InvalidModel(f"{self.name}: dtype {self.dtype} is not known; known: {', '.join(BYTES_PER_ELEMENT)}")
        if any(size < 0 for size in self.shape):
            raise InvalidModel(f"{self.name}: shape {self.shape} has a negative size")

    @property
    def starts_trainable(self) -> bool:
        """Return whether it was trainable when the model was prepared."""
        return self.trainable != self.switched

    def trained_now(self, trainable: bool) -> "TensorSpec":
        return replace(self, trainable=trainable, switched=trainable != self.starts_trainable)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * BYTES_PER_ELEMENT[self.dtype]


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


# A smaller unit never causes a lack of memory.
_LEAST_PARAMS = 2**20
# The advice aims at about this many units.
_PIECES = 16


def why_hardly_cut(spec: ModelSpec, *, units: str) -> str:
    """Return a warning if one unit holds more than half of the parameters; "" if none does or nothing would help.

    `units` is the plan's policy; `none` asks for a single unit.
    """
    largest = max(spec.units, key=lambda unit: unit.num_params)
    longest = max((param.num_elements for param in largest.params), default=0)
    if units == "none" or 2 * largest.num_params <= spec.num_params or largest.num_params < _LEAST_PARAMS:
        return ""
    if 2 * longest > spec.num_params:
        # One tensor, such as a large embedding: it is in one unit under every policy.
        return ""
    share = largest.num_params / spec.num_params
    count = spec.num_params // _PIECES
    # Rounded down to one digit and zeros.
    scale: int = 10 ** (len(str(count)) - 1)
    return (
        f"units = {units!r} leaves {share:.0%} of {spec.name}'s parameters in one unit, {largest.name}, which is "
        f"gathered at once: units = 'min-params:{count // scale * scale}' cuts by size, 'auto + MODULE + …' by name"
    )
