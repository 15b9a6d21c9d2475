"""Bytes that a rank holds of a unit's parameters, gradients and optimizer state, by its placement.

The flat buffers are those that the engine allocates (program/buffers.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from shardwise.base.errors import UnknownName
from shardwise.base.vocabulary.layout import Layout, piece_of_slice
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh, Placement
from shardwise.planner.memory.constants import MemoryRules
from shardwise.program.buffers import FlatSpec, flat_specs, num_pieces
from shardwise.program.rules.context import has_states_on_host
from shardwise.program.spec import TensorSpec, UnitSpec
from shardwise.program.spec.block_matrices import is_block_matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRule:
    """The memory of an optimizer in addition to the parameters that it steps.

    num_moments   numbers per element
    has_steps     a step counter on the device for each parameter tensor
    copies        temporaries of an update, in copies of all parameters
    largest       the same, in copies of the largest parameter
    squares       the same, in squares of that one's shorter side
    matrices      the rule for matrices inside blocks, if they have another one: these are stepped unsharded
    """

    num_moments: int
    has_steps: bool = False
    copies: int = 0
    largest: int = 0
    squares: int = 0
    matrices: "OptimizerRule | None" = None

    def of(self, param: TensorSpec) -> "OptimizerRule":
        return self.matrices if self.matrices is not None and is_block_matrix(param.name, param.shape) else self


# torch/optim/_muon.py: per matrix one copy in fp32 and two of the iteration in bf16; per square two in bf16.
_MUON = OptimizerRule(num_moments=1, largest=2, squares=1)

OPTIMIZERS: Mapping[str, OptimizerRule] = MappingProxyType(
    {
        "adamw-fused": OptimizerRule(num_moments=2, has_steps=True),
        # torch/optim/adam.py: _multi_tensor_adam makes the root of all second moments at once.
        "adamw-foreach": OptimizerRule(num_moments=2, copies=1),
        # _single_tensor_adam: the root, and the root over the bias correction.
        "adamw-loop": OptimizerRule(num_moments=2, has_steps=True, largest=2),
        "adam-fused": OptimizerRule(num_moments=2, has_steps=True),
        # With momentum.
        "sgd": OptimizerRule(num_moments=1),
        "sgd-plain": OptimizerRule(num_moments=0),
        # AdamW except for the matrices of blocks.
        "muon-fused": OptimizerRule(num_moments=2, has_steps=True, matrices=_MUON),
        "muon-foreach": OptimizerRule(num_moments=2, copies=1, matrices=_MUON),
        "muon-loop": OptimizerRule(num_moments=2, has_steps=True, largest=2, matrices=_MUON),
    }
)
"""By name and implementation of the update. Adam's `-foreach` keeps its step counters on the CPU."""

_ALIASES = {"adamw": "adamw-fused", "adam": "adam-fused", "muon": "muon-fused"}


def optimizer_of(name: str) -> OptimizerRule:
    try:
        return OPTIMIZERS[_ALIASES.get(name, name)]
    except KeyError:
        raise UnknownName.of("optimizer", name, known=(*_ALIASES, *OPTIMIZERS)) from None


def needs_whole_matrices(name: str) -> bool:
    """Return whether an optimizer steps unsharded matrices, so that one rank owns each if state is sharded."""
    return optimizer_of(name).matrices is not None


def may_cross(name: str) -> bool:
    """Return whether an optimizer's state may be sharded over both axes of a mesh: whole matrices have one owner."""
    return not needs_whole_matrices(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSetting:
    """The settings that the states of a unit depend on in addition to its placement."""

    plan: Plan
    mesh: Mesh
    optimizer: OptimizerRule
    rules: MemoryRules

    @property
    def num_slices(self) -> int:
        return self.mesh.shard

    def rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self.rules.block_bytes) * self.rules.block_bytes

    def buffer_bytes(self, unit: UnitSpec) -> int:
        return sum(self.rounded(buffer.num_bytes) for buffer in unit.buffers)

    def moments(self, steps: Iterable[tuple[TensorSpec, int]]) -> tuple[int, ...]:
        """Return the sizes of the optimizer's allocations for (parameter, bytes of it that are stepped)."""
        found: list[int] = []
        for param, size in steps:
            rule = self.optimizer.of(param)
            if rule.has_steps:
                found.append(self.rounded(4))
            found += [self.rounded(size)] * rule.num_moments
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitStates:
    """Bytes of a unit on one rank.

    full      unsharded parameters in the compute dtype: always there, or gathered
    params    of full parameters and slices, those that are always there
    optim     the fp32 master if it is separate, and the moments
    reduce    the buffers in which gradients are reduced. `reduces`: each by itself, which is one per piece;
              `reduce_slices`: this rank's part of each
    grads     gradients that the optimizer reads
    owned     what the optimizer steps elementwise, in slices; `largest`: the largest tensor of it
    buffers   the module's buffers
    moments   sizes of the allocations of the optimizer's state, a part of `optim`
    held      sizes of the other allocations of `params` and `optim`
    host      what lives in host memory; `chunk`: the elements of its largest flat slice

    Only for fully_shard, which copies gathered parameters out of a buffer: `flat`, that buffer; `copy_in`, its input;
    `outputs`, sizes of the allocations of `full`. Only for torch's engines: `gradients`, unsharded and one by one, as
    DDP puts them into buckets, and as fully_shard keeps them between the passes of a step; `last_grad`, the gradient of
    the last parameter as autograd makes it, if it outlives its copy into `reduce`.
    """

    full: int
    params: int
    optim: int
    reduce: int
    reduces: tuple[int, ...] = ()
    reduce_slices: tuple[int, ...] = ()
    grads: int
    owned: int
    largest: int
    buffers: int
    moments: tuple[int, ...]
    held: tuple[int, ...]
    host: int = 0
    chunk: int = 0
    flat: int = 0
    copy_in: int = 0
    outputs: tuple[int, ...] = ()
    gradients: tuple[int, ...] = ()
    last_grad: int = 0


def unit_states(unit: UnitSpec, *, placement: Placement, setting: StateSetting) -> UnitStates:
    """Return the bytes of rank 0, whose slices have the least padding."""
    on_host = has_states_on_host(unit.name, plan=setting.plan, placement=placement)
    num = num_pieces(unit, plan=setting.plan)
    flats = [
        _flat_states(flat, placement=placement, setting=setting, on_host=on_host, num_pieces=num)
        for flat in flat_specs(unit, plan=setting.plan)
    ]
    sums = ("full", "params", "optim", "reduce", "grads", "owned", "host")
    return UnitStates(
        **{name: sum(flat[name] for flat in flats) for name in sums},
        reduces=_summed(flat["reduces"] for flat in flats),
        reduce_slices=_summed(flat["reduce_slices"] for flat in flats),
        largest=max((flat["largest"] for flat in flats), default=0),
        chunk=max((flat["chunk"] for flat in flats), default=0),
        buffers=setting.buffer_bytes(unit),
        moments=tuple(size for flat in flats for size in flat["moments"]),
        held=tuple(size for flat in flats for size in flat["held"]),
    )


def _summed(sizes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*sizes, strict=True)))


def _flat_states(
    flat: FlatSpec, *, placement: Placement, setting: StateSetting, on_host: bool, num_pieces: int
) -> dict[str, Any]:
    plan, rounded, num_slices = setting.plan, setting.rounded, setting.num_slices
    mesh, stepped, crosses = setting.mesh, flat.master_bytes, placement.optim.is_sharded_across
    layout = flat.layout(num_slices=mesh.num_ranks if crosses else num_slices)
    num_elements = layout.num_elements
    params_sharded, optim_sharded = placement.params.is_sharded, placement.optim.is_sharded
    full = rounded(num_elements * flat.full_bytes(sharded=params_sharded))
    master = rounded((layout.slice_elements if optim_sharded else num_elements) * stepped)
    # A sharded parameter that computes in the master dtype is its own master; any other fp32 master is separate.
    is_cast = flat.compute_dtype != flat.master_dtype
    is_the_parameter = params_sharded and not is_cast and not crosses
    # The slice that ranks of the replicate axis update parts of; it contains the master if that has its dtype.
    home = rounded(num_elements // num_slices * flat.compute_bytes) if crosses else 0
    steps = [(param, count) for param, count in _stepped(flat, layout, sharded=optim_sharded) if param.trainable]
    if optim_sharded and plan.owned:
        # Matrices with an owner are not sharded (whole_matrices.py).
        steps = [(param, count) for param, count in steps if not plan.owns(param.name)]
    elementwise = [count * stepped for param, count in steps if setting.optimizer.of(param) is setting.optimizer]
    is_trained = any(param.trainable for param in flat.params)
    # Of each piece.
    slices = _slice_pieces(layout, num_pieces=num_pieces) if is_trained else [0] * num_pieces
    num_parts = layout.num_slices // num_slices
    reduces, slices = (
        [rounded(times * size * flat.reduce_bytes) for size in slices] for times in (layout.num_slices, num_parts)
    )
    reduce = sum(reduces)
    if placement.grads.is_sharded:
        grads = rounded(num_elements // mesh.num_parts(placement.grads.axes) * stepped)
    else:
        grads = rounded(num_elements * stepped) if flat.reduce_dtype != flat.master_dtype else reduce
    moments = () if on_host else setting.moments((param, count * stepped) for param, count in steps)
    if on_host and plan.offload_update == "device":
        # Step counts are where the update is.
        moments = tuple(rounded(4) for param, _ in steps if setting.optimizer.of(param).has_steps)
    held = master if (is_the_parameter or is_cast) and not on_host else 0
    return {
        "full": full,
        "params": (0 if params_sharded else full) + (held if is_the_parameter else home),
        "optim": (0 if is_the_parameter else held) + sum(moments),
        "reduce": reduce,
        "reduces": reduces,
        "reduce_slices": slices,
        "grads": grads if is_trained else 0,
        "owned": 0 if on_host else sum(elementwise),
        "largest": 0 if on_host else max(elementwise, default=0),
        "host": _host_bytes(flat, layout, is_trained=is_trained, setting=setting) if on_host else 0,
        "chunk": layout.slice_elements if on_host and is_trained else 0,
        "moments": moments,
        "held": tuple(size for size in (0 if params_sharded else full, home, held) if size),
    }


def _slice_pieces(layout: Layout, *, num_pieces: int) -> list[int]:
    """Return the elements of a slice in each piece."""
    pieces = (piece_of_slice(layout.slice_elements, number=n, num_pieces=num_pieces) for n in range(num_pieces))
    return [stop - start for start, stop in pieces]


def _host_bytes(flat: FlatSpec, layout: Layout, *, is_trained: bool, setting: StateSetting) -> int:
    """Return the bytes of a slice in host memory: master, cast parameters, state, and gradients that are read there."""
    each = flat.master_bytes
    if flat.compute_dtype != flat.master_dtype:
        each += flat.full_bytes(sharded=False)
    if is_trained:
        each += flat.master_bytes * setting.optimizer.num_moments
        each += flat.master_bytes if setting.plan.offload_update == "host" else 0
    return layout.slice_elements * each


def _stepped(flat: FlatSpec, layout: Layout, *, sharded: bool) -> list[tuple[TensorSpec, int]]:
    """Return (parameter, number of its elements) that rank 0 steps."""
    if not sharded:
        return [(param, param.num_elements) for param in flat.params if param.num_elements]
    return [(flat.params[index], stop - start) for index, start, stop in layout.owned(0)]
