"""Matrices that are stepped unsharded: those with an owner rank, and those with a matrix rule of the optimizer.

An optimizer like Muon steps complete matrices of blocks. If every rank holds all state, each steps all of them; if
state is sharded, each matrix is OWNED: one rank steps it and holds its state.

The sizes of units under a plan, in elements and bytes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwise.base.errors import InvalidModel, InvalidPlan
from shardwise.base.vocabulary.dtypes import BYTES_PER_ELEMENT
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS
from shardwise.plan.patterns import short_patterns
from shardwise.plan.placement import Placement
from shardwise.planner.memory.states import OptimizerRule
from shardwise.program.buffers import (
    DtypeSettings,
    dtype_settings,
    flat_specs,
    gather_bytes,
    param_dtypes,
    plan_with,
    reduce_bytes,
)
from shardwise.program.owners import assign_owners
from shardwise.program.spec import ModelSpec, TensorSpec, UnitSpec
from shardwise.program.spec.block_matrices import block_matrices, is_block_matrix

MASTER_BYTES = 4
"""Bytes per element that the optimizer steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSizes:
    """A unit.

    elements            of all parameters; `trainable`: of the trainable ones, in `tensors` tensors
    compute_bytes       all parameters in their compute dtypes
    grad_bytes          gradients in the dtypes of autograd
    reduce_bytes        gradients in the reduce dtype
    """

    elements: int
    trainable: int
    tensors: int
    compute_bytes: int
    grad_bytes: int
    reduce_bytes: int

    @property
    def is_cast(self) -> bool:
        """Return whether the compute dtype differs from the optimizer's."""
        return self.compute_bytes != MASTER_BYTES * self.elements


def sizes_of(spec: ModelSpec, *, plan: Plan) -> Mapping[str, UnitSizes]:
    return _sizes(spec, dtype_settings(plan))


@lru_cache(maxsize=64)
def _sizes(spec: ModelSpec, settings: DtypeSettings) -> Mapping[str, UnitSizes]:
    plan = plan_with(settings)
    return {unit.name: _unit_sizes(unit, plan=plan) for unit in spec.units}


def _unit_sizes(unit: UnitSpec, *, plan: Plan) -> UnitSizes:
    trained = [param for param in unit.params if param.trainable]
    return UnitSizes(
        elements=unit.num_params,
        trainable=sum(param.num_elements for param in trained),
        tensors=len(trained),
        compute_bytes=gather_bytes(unit, plan=plan, sharded=False),
        grad_bytes=sum(p.num_elements * BYTES_PER_ELEMENT[param_dtypes(p, plan=plan)[0]] for p in trained),
        reduce_bytes=reduce_bytes(unit, plan=plan),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeMatrix:
    """`num_bytes` in the dtype in which it is stepped."""

    unit: str
    param: TensorSpec
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeMatrices:
    """`on_all`: matrices that every rank steps by a matrix rule; `owned`: by rank, those that it alone steps."""

    on_all: tuple[WholeMatrix, ...]
    owned: tuple[tuple[WholeMatrix, ...], ...]

    def on(self, rank: int) -> tuple[WholeMatrix, ...]:
        """Return the matrices that a rank of the shard axis steps."""
        return (*self.on_all, *self.owned[rank])

    def owned_bytes(self, rank: int) -> Counter[str]:
        """Return the bytes that a rank owns, by unit."""
        found: Counter[str] = Counter()
        for matrix in self.owned[rank]:
            found[matrix.unit] += matrix.num_bytes
        return found


def with_owners(spec: ModelSpec, *, plan: Plan, optimizer: OptimizerRule) -> Plan:
    """Return the plan as `prepare` runs it: with owners for the matrices that the optimizer needs unsharded."""
    if optimizer.matrices is None:
        return plan
    if not block_matrices(spec):
        raise InvalidModel(f"optimizer muon: {spec.name} has no matrix in a layer of a numbered block; use adamw")
    placements = {unit.name: plan.placement(unit.name) for unit in spec.units}
    refusal = LIMITS[plan.engine].why_not_call("muon", plan, placements=placements)
    if refusal is not None:
        raise InvalidPlan(
            f"optimizer muon with engine = {plan.engine!r} under {plan.strategy}: {refusal.sentence}; "
            "use engine = 'shardwise', or strategy = 'ddp'"
        )
    patterns = _patterns(spec, frozenset(name for name, placed in placements.items() if placed.optim.is_sharded))
    return replace(plan, owned=tuple(dict.fromkeys((*plan.owned, *patterns)))) if patterns else plan


@lru_cache(maxsize=256)
def _patterns(spec: ModelSpec, sharded: frozenset[str]) -> tuple[str, ...]:
    """Return patterns that match the block matrices of these units."""
    inside = {param.name for unit in spec.units if unit.name in sharded for param in unit.params}
    names = [name for name in block_matrices(spec) if name in inside]
    return short_patterns(names, among=[param.name for unit in spec.units for param in unit.params])


def whole_matrices(
    units: Iterable[tuple[UnitSpec, int]],
    *,
    plan: Plan,
    placements: Mapping[str, Placement],
    optimizer: OptimizerRule,
    num_slices: int,
) -> WholeMatrices:
    """Return the matrices of (unit, number of units that it stands for)."""
    on_all: list[WholeMatrix] = []
    to_own: list[WholeMatrix] = []
    if plan.owned or optimizer.matrices is not None:
        for unit, count in units:
            is_sharded = placements[unit.name].optim.is_sharded
            for matrix in _trained(unit, plan=plan):
                if is_sharded and plan.owns(matrix.param.name):
                    to_own += [matrix] * count
                elif not is_sharded and optimizer.of(matrix.param) is not optimizer:
                    on_all += [matrix] * count
    owners = assign_owners([matrix.param.shape for matrix in to_own], num_ranks=num_slices) if to_own else []
    owned = tuple(
        tuple(matrix for matrix, owner in zip(to_own, owners, strict=True) if owner == rank)
        for rank in range(num_slices)
    )
    return WholeMatrices(on_all=tuple(on_all), owned=owned)


def _trained(unit: UnitSpec, *, plan: Plan) -> list[WholeMatrix]:
    return [
        WholeMatrix(unit=unit.name, param=param, num_bytes=flat.master_bytes * param.num_elements)
        for flat in flat_specs(unit, plan=plan)
        for param in flat.params
        if flat.is_trained and param.trainable and param.num_elements
    ]


def update_bytes(
    matrices: Sequence[WholeMatrix], *, optimizer: OptimizerRule, in_slices: int, largest_slice: int
) -> int:
    """Return the temporaries of a step of these matrices and of slices; the matrix rule runs first."""
    by_own_rule = [matrix.num_bytes for matrix in matrices if optimizer.of(matrix.param) is optimizer]
    at_once = optimizer.copies * (in_slices + sum(by_own_rule))
    most = at_once + optimizer.largest * max(largest_slice, *by_own_rule, 0)
    if optimizer.matrices is None:
        return most
    by_another = [matrix for matrix in matrices if optimizer.of(matrix.param) is not optimizer]
    return max(most, *(_update_bytes(matrix, rule=optimizer.matrices) for matrix in by_another), 0)


def _update_bytes(matrix: WholeMatrix, *, rule: OptimizerRule) -> int:
    squared = min(matrix.param.shape) ** 2 * matrix.num_bytes // matrix.param.num_elements
    return rule.largest * matrix.num_bytes + rule.squares * squared


def matrix_sizes(unit: UnitSpec, *, optimizer: OptimizerRule) -> tuple[int, int]:
    """Return (elements, tensors) of a unit that are trained by the matrix rule."""
    if optimizer.matrices is None:
        return 0, 0
    found = [p.num_elements for p in unit.params if p.trainable and is_block_matrix(p.name, p.shape)]
    return sum(found), len(found)
