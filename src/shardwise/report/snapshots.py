"""What a rank holds after each operation of a step: a program or a recorded tape, replayed unit by unit.

Counted are parameters, gradients and two fp32 moments per trainable parameter (AdamW), all in fp32. Not counted
are activations, padding, and copies that live only inside an operation.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from shardwise.bench.case_result import UnitOutline
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import SHARDED, Placement
from shardwise.program import Kind, Operation, Row, StepProgram, build, crossing_buckets
from shardwise.program.run import run_in_order
from shardwise.spec import ModelSpec, UnitSpec

STATES = ("params", "grads", "optim")
_FP32_BYTES = 4
_NUM_MOMENTS = 2


class Holding(Enum):
    """What a rank has of one unit's parameters, gradients or optimizer state."""

    NOTHING = "nothing"
    SLICE = "own slice"
    WHOLE = "whole"
    ON_ITS_WAY = "on its way"
    DIFFERS = "differs from rank to rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a rank holds once an operation is issued; the first snapshot, before any, has no operation.

    `holds` maps params, grads, optim → unit → what is held of it.
    """

    row: Row | None
    operation: Operation | None
    holds: Mapping[str, Mapping[str, Holding]]
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSnapshots:
    """A step, snapshot by snapshot."""

    program: StepProgram
    placements: Mapping[str, Placement]
    snapshots: tuple[Snapshot, ...]
    mesh: Mesh

    @property
    def peak(self) -> Snapshot:
        """The first snapshot that holds the most."""
        return max(self.snapshots, key=lambda snapshot: snapshot.held_bytes)

    def sent_bytes(self, kind: Kind) -> float:
        """What a rank sends in a step for its gathers or its reduces, on rings of n ranks.

        (n-1)/n of the bytes for an all-gather or a reduce-scatter, twice that for an all-reduce.
        """
        scattered = {
            bucket.name for bucket in self.program.buckets if self.placements[bucket.units[0]].grads is SHARDED
        }
        sent = 0.0
        for operation in self.program.operations():
            if operation.kind is not kind:
                continue
            if kind is Kind.REDUCE_SLICE:
                halves, length = 2, self.mesh.replicate
            elif kind is Kind.REDUCE and operation.subject not in scattered:
                halves, length = 2, self.mesh.num_ranks
            else:
                halves, length = 1, self.mesh.shard
            if kind in (Kind.TO_OWNERS, Kind.FROM_OWNERS):
                # Each rank sends of its own slices.
                sent += operation.num_bytes * (length - 1) / length**2
                continue
            sent += halves * operation.num_bytes * (length - 1) / length
        return sent


def snapshots_of(spec: ModelSpec, *, plan: Plan, num_ranks: int) -> StepSnapshots:
    """The snapshots of a step that comes after others."""
    program = build(spec, plan=plan)
    mesh = plan.mesh or Mesh(shard=num_ranks)
    state = RankState(
        map(_sizes, spec.units),
        placements=plan.placements(unit.name for unit in spec.units),
        buckets={bucket.name: bucket.units for bucket in program.buckets},
        num_slices=mesh.shard,
    )
    state.begin_after(program.operations())
    snapshots = [state.snapshot(None, None)]

    def do(operation: Operation, row: Row) -> None:
        state.do(operation)
        snapshots.append(state.snapshot(row, operation))

    run_in_order(program, do)
    return StepSnapshots(program=program, placements=state.placements, snapshots=tuple(snapshots), mesh=mesh)


def bucket_label(units: tuple[str, ...]) -> str:
    """blocks.2+1 for two neighbours, blocks.11…(root) for many."""
    if len(units) == 1:
        return units[0]
    first, last = units[0], units[-1]
    stem = first.rpartition(".")[0]
    if stem and last.startswith(stem + "."):
        last = last.removeprefix(stem + ".")
    return f"{first}{'+' if len(units) == 2 else '…'}{last}"


class RankState:
    """What one rank holds now. `num_slices`: into how many slices a sharded unit is cut."""

    def __init__(
        self,
        units: Iterable[UnitOutline],
        *,
        placements: Mapping[str, Placement],
        buckets: Mapping[str, tuple[str, ...]],
        num_slices: int,
    ) -> None:
        self.units = {unit.name: unit for unit in units}
        self.placements = placements
        self.buckets = buckets
        self.num_slices = num_slices
        self.params = {name: self._home(name, "params") for name in self.units}
        self.optim = {name: self._home(name, "optim") for name in self.units}
        self.grads: dict[str, Holding] = {}
        # Units of which a slice of the gradients is on its way over a second axis of the mesh.
        self.crossing: set[str] = set()
        # Of each unit, the matrices that are here whole, to be updated, and their gradients.
        self.owned_bytes: dict[str, int] = {}
        self._crossing_buckets: frozenset[str] = frozenset()
        self._drop_grads()

    def begin_after(self, operations: Iterable[Operation]) -> None:
        """Do the step before, which is the same: what it leaves in flight is what the next one finds."""
        operations = tuple(operations)
        self._crossing_buckets = crossing_buckets(operations)
        for operation in operations:
            self.do(operation)
        self._drop_grads()

    def _home(self, name: str, state: str) -> Holding:
        """As the placement has it; frozen parameters have no optimizer state and no gradients."""
        if state != "params" and not self.units[name].num_trained:
            return Holding.NOTHING
        return Holding.SLICE if getattr(self.placements[name], state) is SHARDED else Holding.WHOLE

    def _drop_grads(self) -> None:
        self.grads = dict.fromkeys(self.units, Holding.NOTHING)
        self.crossing.clear()

    def do(self, operation: Operation) -> None:
        name = operation.subject
        match operation.kind:
            case Kind.GATHER:
                self.params[name] = Holding.ON_ITS_WAY
            case Kind.WAIT_GATHER:
                self.params[name] = Holding.WHOLE
            case Kind.FREE:
                self.params[name] = Holding.SLICE
            case Kind.BACKWARD if self.units[name].num_trained:
                self.grads[name] = Holding.DIFFERS
            case Kind.REDUCE:
                self.grads.update(dict.fromkeys(self.buckets[name], Holding.ON_ITS_WAY))
            case Kind.WAIT_REDUCE if name in self._crossing_buckets:
                # The sum over its own group of ranks: not a gradient yet.
                pass
            case Kind.REDUCE_SLICE:
                self.crossing.update(self.buckets[name])
            case Kind.WAIT_REDUCE | Kind.WAIT_SLICE:
                self.crossing.difference_update(self.buckets[name])
                self.grads.update({member: self._home(member, "grads") for member in self.buckets[name]})
            case Kind.UPDATE:
                self._update()
            case Kind.FORWARD | Kind.BACKWARD | Kind.TAKE_GRADS | Kind.REDUCE_FLAGS | Kind.BROADCAST:
                # Nothing that is counted here comes or goes.
                pass
            case Kind.TO_OWNERS:
                # Copies beside the slices; each rank owns about as much as the others.
                self.owned_bytes[name] = operation.num_bytes // self.num_slices
            case Kind.FROM_OWNERS:
                self.owned_bytes.pop(name, None)
            case _:
                assert_never(operation.kind)

    def _update(self) -> None:
        """Replicated parameters of which each rank updates a slice differ between ranks until they are gathered."""
        for name, placement in self.placements.items():
            if placement.params is not SHARDED and self.optim[name] is Holding.SLICE:
                self.params[name] = Holding.DIFFERS

    def holds(self) -> dict[str, dict[str, Holding]]:
        """params, grads, optim → unit → what is held of it now."""
        return {state: dict(getattr(self, state)) for state in STATES}

    def snapshot(self, row: Row | None, operation: Operation | None) -> Snapshot:
        holds = self.holds()
        held_bytes = sum(self._bytes(name, holds) for name in self.units) + sum(self.owned_bytes.values())
        return Snapshot(row=row, operation=operation, holds=holds, held_bytes=held_bytes)

    def _bytes(self, name: str, holds: Mapping[str, Mapping[str, Holding]]) -> int:
        unit = self.units[name]
        params, grads = unit.num_params * _FP32_BYTES, unit.num_trained * _FP32_BYTES
        held = self._part(grads, Holding.SLICE if name in self.crossing else holds["grads"][name])
        held += self._part(_NUM_MOMENTS * grads, holds["optim"][name])
        held += self._part(params, holds["params"][name])
        # What is gathered is a copy, in addition to the slice that the rank owns.
        if self.placements[name].params is SHARDED and holds["params"][name] is not Holding.SLICE:
            held += self._part(params, Holding.SLICE)
        return held

    def _part(self, num_bytes: int, held: Holding) -> int:
        if held is Holding.NOTHING:
            return 0
        return -(-num_bytes // self.num_slices) if held is Holding.SLICE else num_bytes


def _sizes(unit: UnitSpec) -> UnitOutline:
    trained = sum(param.num_elements for param in unit.params if param.trainable)
    return UnitOutline(name=unit.name, num_params=unit.num_params, num_trained=trained)
