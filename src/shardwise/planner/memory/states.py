"""What a rank holds of a unit's parameters, gradients and optimizer state, by its placement.

The layout is the engine's (layout.py): parameters of equal dtypes lie end to end, each start aligned, and the
end is padded so that the ranks of the shard axis own equal slices.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from shardwise.errors import UnknownName
from shardwise.placement import SHARDED, Placement
from shardwise.plan import Plan
from shardwise.planner.memory.constants import MemoryRules
from shardwise.program.build import compute_bytes
from shardwise.spec import TensorSpec, UnitSpec
from shardwise.spec.tensor import BYTES_PER_ELEMENT

ALIGNMENT = 32
"""In elements; that of layout.py."""

REDUCE_BYTES: Mapping[str, int] = MappingProxyType({"fp32": 4, "bf16": 2, "fp16": 2})


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRule:
    """What an optimizer holds beside the parameters that it steps.

    num_moments   numbers a parameter
    has_steps     a counter for each parameter tensor
    copies        what an update makes for a while, in copies of all parameters
    largest       the same, in copies of the largest parameter
    """

    num_moments: int
    has_steps: bool = False
    copies: int = 0
    largest: int = 0


OPTIMIZERS: Mapping[str, OptimizerRule] = MappingProxyType(
    {
        "adamw-fused": OptimizerRule(num_moments=2, has_steps=True),
        # torch/optim/adam.py: _multi_tensor_adam takes the root of all second moments at once.
        "adamw-foreach": OptimizerRule(num_moments=2, copies=1),
        # _single_tensor_adam: the root, and the root over the bias correction.
        "adamw-loop": OptimizerRule(num_moments=2, has_steps=True, largest=2),
        "adam-fused": OptimizerRule(num_moments=2, has_steps=True),
        # As it is mostly used: with momentum.
        "sgd": OptimizerRule(num_moments=1),
        "sgd-plain": OptimizerRule(num_moments=0),
    }
)
"""By name; where several kernels do the same update, by kernel. An `-foreach` of Adam keeps its counters on the CPU."""

_ALIASES = {"adamw": "adamw-fused", "adam": "adam-fused"}


def optimizer_of(name: str) -> OptimizerRule:
    try:
        return OPTIMIZERS[_ALIASES.get(name, name)]
    except KeyError:
        raise UnknownName.of("optimizer", name, known=(*_ALIASES, *OPTIMIZERS)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitStates:
    """Bytes that one rank has for a unit.

    full      the parameters whole, as they compute: always there, or gathered
    params    of that and of slices, what is always there
    optim     the fp32 master where it is apart, and the moments
    reduce    the buffer in which gradients are reduced; `reduce_slice` of it, what this rank gets
    grads     gradients that the optimizer reads
    owned     what the optimizer steps; `largest` of its tensors
    buffers   the module's
    moments   of `optim`, the single allocations of the optimizer's own state
    held      the single allocations of the rest of `params` and `optim`
    """

    full: int
    params: int
    optim: int
    reduce: int
    reduce_slice: int = 0
    grads: int
    owned: int
    largest: int
    buffers: int
    moments: tuple[int, ...]
    held: tuple[int, ...]


def unit_states(
    unit: UnitSpec,
    *,
    placement: Placement,
    plan: Plan,
    num_slices: int,
    optimizer: OptimizerRule,
    rules: MemoryRules,
) -> UnitStates:
    """The bytes of rank 0, whose slices have the least padding."""
    flats = [
        _flat_states(params, placement=placement, plan=plan, num_slices=num_slices, optimizer=optimizer, rules=rules)
        for params in _flats(unit, plan=plan)
    ]
    sums = ("full", "params", "optim", "reduce", "reduce_slice", "grads", "owned")
    return UnitStates(
        **{name: sum(flat[name] for flat in flats) for name in sums},
        largest=max((flat["largest"] for flat in flats), default=0),
        buffers=sum(rounded(buffer.num_bytes, rules=rules) for buffer in unit.buffers),
        moments=tuple(size for flat in flats for size in flat["moments"]),
        held=tuple(size for flat in flats for size in flat["held"]),
    )


def rounded(num_bytes: int, *, rules: MemoryRules) -> int:
    return -(-num_bytes // rules.block_bytes) * rules.block_bytes


def master_bytes(param: TensorSpec, *, plan: Plan) -> int:
    """The size of an element of what the optimizer steps."""
    own = BYTES_PER_ELEMENT[param.dtype]
    is_float = param.dtype.startswith(("float", "bfloat"))
    return own if plan.precision == "native" or not is_float else 4


def _flats(unit: UnitSpec, *, plan: Plan) -> list[list[TensorSpec]]:
    """Parameters that compute and are stepped in the same dtypes share a buffer."""
    flats: dict[tuple[int, int], list[TensorSpec]] = {}
    for param in unit.params:
        key = (compute_bytes(param, plan=plan), master_bytes(param, plan=plan))
        flats.setdefault(key, []).append(param)
    return list(flats.values())


def _flat_states(
    params: Sequence[TensorSpec],
    *,
    placement: Placement,
    plan: Plan,
    num_slices: int,
    optimizer: OptimizerRule,
    rules: MemoryRules,
) -> dict[str, Any]:
    computes, stepped = compute_bytes(params[0], plan=plan), master_bytes(params[0], plan=plan)
    num_elements = padded_elements([param.num_elements for param in params], num_slices=num_slices)
    optim_slice = num_elements // num_slices if placement.optim is SHARDED else num_elements
    full = rounded(num_elements * computes, rules=rules)
    master = rounded(optim_slice * stepped, rules=rules)
    params_sharded = placement.params is SHARDED
    separate = params_sharded or computes != stepped
    # A slice that computes as it is stepped is the parameter itself; an fp32 master beside it is the optimizer's.
    is_the_parameter = params_sharded and computes == stepped
    owned = _owned(params, num_elements=optim_slice)
    trainable = [count for param, count in zip(params, owned, strict=True) if count and param.trainable]
    moments = moment_bytes([count * stepped for count in trainable], optimizer=optimizer, rules=rules)
    reduces = max(REDUCE_BYTES[plan.reduce_dtype], stepped if stepped > 4 else 0)
    any_trainable = any(param.trainable for param in params)
    reduce = rounded(num_elements * reduces, rules=rules) if any_trainable else 0
    reduce_slice = rounded(num_elements // num_slices * reduces, rules=rules) if any_trainable else 0
    grads = rounded(num_elements // num_slices * stepped, rules=rules) if placement.grads is SHARDED else reduce
    if placement.grads is not SHARDED and reduces != stepped:
        grads = rounded(num_elements * stepped, rules=rules)
    on_host = plan.offload_states and placement.grads is SHARDED
    moments = () if on_host else moments
    held = 0 if on_host else master if separate else 0
    return {
        "full": full,
        "params": (0 if params_sharded else full) + (held if is_the_parameter else 0),
        "optim": (0 if is_the_parameter else held) + sum(moments),
        "reduce": reduce,
        "reduce_slice": reduce_slice,
        "grads": grads if any_trainable else 0,
        "owned": 0 if on_host else sum(count * stepped for count in trainable),
        "largest": 0 if on_host else max((count * stepped for count in trainable), default=0),
        "moments": moments,
        "held": tuple(size for size in (0 if params_sharded else full, held) if size),
    }


def moment_bytes(sizes: Sequence[int], *, optimizer: OptimizerRule, rules: MemoryRules) -> tuple[int, ...]:
    """The optimizer's own state of tensors of these sizes, allocation by allocation."""
    counters = (rounded(4, rules=rules),) if optimizer.has_steps and rules.steps_on_device else ()
    return tuple(
        num_bytes for size in sizes for num_bytes in (*counters, *[rounded(size, rules=rules)] * optimizer.num_moments)
    )


def padded_elements(sizes: Sequence[int], *, num_slices: int) -> int:
    """The length of a buffer of parameters of these sizes."""
    end = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
    multiple = num_slices * ALIGNMENT
    return -(-end // multiple) * multiple


def _owned(params: Sequence[TensorSpec], *, num_elements: int) -> list[int]:
    """How much of each parameter lies in the first `num_elements` of the buffer."""
    counts = []
    start = 0
    for param in params:
        counts.append(max(0, min(param.num_elements, num_elements - start)))
        start += -(-param.num_elements // ALIGNMENT) * ALIGNMENT
    return counts
