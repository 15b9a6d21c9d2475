"""What a rank holds of a unit's parameters, gradients and optimizer state, by its placement.

The flat buffers are those that the engine allocates (program/buffers.py).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from shardwise.errors import UnknownName
from shardwise.plan import Plan
from shardwise.plan.placement import SHARDED, Placement
from shardwise.planner.memory.constants import MemoryRules
from shardwise.program.buffers import SAMPLED_EVERY, FlatSpec, flat_specs
from shardwise.spec import TensorSpec, UnitSpec
from shardwise.spec.block_matrices import is_block_matrix
from shardwise.vocabulary.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRule:
    """What an optimizer holds in addition to the parameters that it steps.

    num_moments   numbers a parameter
    has_steps     a counter for each parameter tensor
    copies        what an update makes for a while, in copies of all parameters
    largest       the same, in copies of the largest parameter
    squares       the same, in squares of that one's shorter side
    matrices      the rule of the matrices inside blocks, where they have another one: these are stepped whole
    """

    num_moments: int
    has_steps: bool = False
    copies: int = 0
    largest: int = 0
    squares: int = 0
    matrices: "OptimizerRule | None" = None

    def of(self, param: TensorSpec) -> "OptimizerRule":
        """The rule of one parameter."""
        takes = self.matrices is not None and is_block_matrix(param.name, param.shape)
        return self.matrices if takes and self.matrices is not None else self


# torch/optim/_muon.py: of a matrix, what is stepped in fp32, and two of the iteration in bf16; of what the iteration
# squares, two in bf16.
_MUON = OptimizerRule(num_moments=1, largest=2, squares=1)


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
        # muon.py: AdamW but for the matrices of blocks.
        "muon-fused": OptimizerRule(num_moments=2, has_steps=True, matrices=_MUON),
        "muon-foreach": OptimizerRule(num_moments=2, copies=1, matrices=_MUON),
        "muon-loop": OptimizerRule(num_moments=2, has_steps=True, largest=2, matrices=_MUON),
    }
)
"""By name; where several kernels do the same update, by kernel. An `-foreach` of Adam keeps its counters on the CPU."""

_ALIASES = {"adamw": "adamw-fused", "adam": "adam-fused", "muon": "muon-fused"}


def optimizer_of(name: str) -> OptimizerRule:
    try:
        return OPTIMIZERS[_ALIASES.get(name, name)]
    except KeyError:
        raise UnknownName.of("optimizer", name, known=(*_ALIASES, *OPTIMIZERS)) from None


def needs_whole_matrices(name: str) -> bool:
    """Whether an optimizer takes matrices whole, so that one rank owns each where state is sharded."""
    return optimizer_of(name).matrices is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitStates:
    """Bytes that one rank has for a unit.

    full      the parameters whole, as they compute: always there, or gathered
    params    of that and of slices, what is always there
    optim     the fp32 master where it is apart, and the moments
    reduce    the buffer in which gradients are reduced; `reduce_slice` of it, what this rank gets
    grads     gradients that the optimizer reads
    owned     what the optimizer steps, less what it steps by a rule for matrices, or whole; `largest` of its tensors
    buffers   the module's
    moments   of `optim`, the single allocations of the optimizer's own state
    held      the single allocations of the rest of `params` and `optim`
    samples   of a captured step, what is kept of each gradient to compare it

    Where a gather is copied out of a buffer (fully_shard): `flat`, that buffer; `copy_in`, what it is filled from; and
    `outputs`, the single allocations of `full`. Of torch's engines: `gradients`, whole and one by one, as DDP puts them
    into buckets, and as fully_shard keeps them between the passes of a step.
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
    samples: tuple[int, ...] = ()
    flat: int = 0
    copy_in: int = 0
    outputs: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()


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
        _flat_states(flat, placement=placement, plan=plan, num_slices=num_slices, optimizer=optimizer, rules=rules)
        for flat in flat_specs(unit, plan=plan)
    ]
    sums = ("full", "params", "optim", "reduce", "reduce_slice", "grads", "owned")
    return UnitStates(
        **{name: sum(flat[name] for flat in flats) for name in sums},
        largest=max((flat["largest"] for flat in flats), default=0),
        buffers=sum(rounded(buffer.num_bytes, rules=rules) for buffer in unit.buffers),
        moments=tuple(size for flat in flats for size in flat["moments"]),
        held=tuple(size for flat in flats for size in flat["held"]),
        samples=tuple(size for flat in flats for size in flat["samples"]) if plan.captures else (),
    )


def rounded(num_bytes: int, *, rules: MemoryRules) -> int:
    return -(-num_bytes // rules.block_bytes) * rules.block_bytes


def _flat_states(
    flat: FlatSpec,
    *,
    placement: Placement,
    plan: Plan,
    num_slices: int,
    optimizer: OptimizerRule,
    rules: MemoryRules,
) -> dict[str, Any]:
    computes, stepped, reduces = flat.compute_bytes, flat.master_bytes, flat.reduce_bytes
    layout = flat.layout(num_slices=num_slices)
    num_elements = layout.num_elements
    optim_slice = layout.slice_elements if placement.optim is SHARDED else num_elements
    full = rounded(num_elements * computes, rules=rules)
    master = rounded(optim_slice * stepped, rules=rules)
    params_sharded = placement.params is SHARDED
    separate = params_sharded or flat.compute_dtype != flat.master_dtype
    # A slice that computes as it is stepped is the parameter itself; a separate fp32 master is the optimizer's.
    is_the_parameter = params_sharded and flat.compute_dtype == flat.master_dtype
    sharded = placement.optim is SHARDED
    steps = [(param, count) for param, count in _owned(flat, layout, sharded=sharded) if param.trainable]
    trainable = [count for _, count in steps]
    if sharded and plan.owned:
        # What one rank owns, it has whole (whole_matrices.py).
        steps = [(param, count) for param, count in steps if not plan.owns(param.name)]
    moments = moment_bytes([(param, count * stepped) for param, count in steps], optimizer=optimizer, rules=rules)
    elementwise = [count * stepped for param, count in steps if optimizer.of(param) is optimizer]
    any_trainable = any(param.trainable for param in flat.params)
    reduce = rounded(num_elements * reduces, rules=rules) if any_trainable else 0
    reduce_slice = rounded(num_elements // num_slices * reduces, rules=rules) if any_trainable else 0
    grads = rounded(num_elements // num_slices * stepped, rules=rules) if placement.grads is SHARDED else reduce
    if placement.grads is not SHARDED and flat.reduce_dtype != flat.master_dtype:
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
        "owned": 0 if on_host else sum(elementwise),
        "largest": 0 if on_host else max(elementwise, default=0),
        "moments": moments,
        "held": tuple(size for size in (0 if params_sharded else full, held) if size),
        "samples": tuple(rounded(-(-count // SAMPLED_EVERY) * stepped, rules=rules) for count in trainable),
    }


def moment_bytes(
    steps: Iterable[tuple[TensorSpec, int]], *, optimizer: OptimizerRule, rules: MemoryRules
) -> tuple[int, ...]:
    """The optimizer's own state of so many bytes of each parameter, allocation by allocation."""
    found: list[int] = []
    for param, size in steps:
        rule = optimizer.of(param)
        if rule.has_steps and rules.steps_on_device:
            found.append(rounded(4, rules=rules))
        found += [rounded(size, rules=rules)] * rule.num_moments
    return tuple(found)


def _owned(flat: FlatSpec, layout: Layout, *, sharded: bool) -> list[tuple[TensorSpec, int]]:
    """(parameter, how many of its elements) rank 0 steps."""
    if not sharded:
        return [(param, param.num_elements) for param in flat.params if param.num_elements]
    return [(flat.params[index], stop - start) for index, start, stop in layout.owned(0)]
