"""Snapshots of a step: the state of each unit on one rank after each operation of a program or a recorded tape.

Held bytes count parameters, gradients and two moments per trainable parameter (AdamW), all in fp32. They do not count
activations, padding, and copies that live only inside an operation.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from shardwise.measure.bench.case_result import UnitOutline
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh, Placement
from shardwise.planner.traffic import sent_by_kind
from shardwise.program import Kind, Operation, Row, StepProgram, build, crossing_buckets
from shardwise.program.run import run_in_order
from shardwise.program.spec import ModelSpec

STATES = ("params", "grads", "optim")
_FP32_BYTES = 4
_NUM_MOMENTS = 2


class Holding(Enum):
    """The part of one unit's parameters, gradients or optimizer state that a rank has."""

    NOTHING = "nothing"
    SLICE = "own slice"
    WHOLE = "whole"
    ON_ITS_WAY = "on its way"
    DIFFERS = "differs from rank to rank"
    PART = "part of own slice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of a rank once an operation is issued; the first snapshot, before any, has no operation.

    `holds` maps params, grads, optim → unit → the part that is held.
    """

    row: Row | None
    operation: Operation | None
    holds: Mapping[str, Mapping[str, Holding]]
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSnapshots:
    """A step, snapshot by snapshot, and the bytes that a rank sends for each kind of operation."""

    program: StepProgram
    snapshots: tuple[Snapshot, ...]
    sent: Mapping[Kind, float]

    @property
    def peak(self) -> Snapshot:
        """The first snapshot that holds the most."""
        return max(self.snapshots, key=lambda snapshot: snapshot.held_bytes)

    def sent_bytes(self, kind: Kind) -> float:
        """Return the bytes that a rank sends in a step for operations of this kind."""
        return self.sent.get(kind, 0.0)


def snapshots_of(spec: ModelSpec, *, plan: Plan, num_ranks: int) -> StepSnapshots:
    """Return the snapshots of a step that follows an equal step."""
    program = build(spec, plan=plan)
    mesh = plan.mesh or Mesh(shard=num_ranks)
    state = RankState(
        map(UnitOutline.of, spec.units),
        placements=plan.placements(unit.name for unit in spec.units),
        buckets={bucket.name: bucket.units for bucket in program.buckets},
        crossing_buckets=crossing_buckets(program.operations()),
        num_slices=mesh.shard,
        num_groups=mesh.replicate,
        on_host={unit.name for unit in spec.units if plan.has_states_on_host(unit.name)},
    )
    run_in_order(program, lambda operation, row: state.do(operation))
    state.begin_step()
    snapshots = [state.snapshot(None, None)]

    def do(operation: Operation, row: Row) -> None:
        state.do(operation)
        snapshots.append(state.snapshot(row, operation))

    run_in_order(program, do)
    return StepSnapshots(
        program=program,
        snapshots=tuple(snapshots),
        sent=sent_by_kind(program, placements=state.placements, mesh=mesh),
    )


def bucket_label(name: str, units: tuple[str, ...]) -> str:
    """Return blocks.2+1 for two neighbours, blocks.11…(root) for many; the name of one unit, or of its piece."""
    if len(units) == 1:
        return name
    first, last = units[0], units[-1]
    stem = first.rpartition(".")[0]
    if stem and last.startswith(stem + "."):
        last = last.removeprefix(stem + ".")
    return f"{first}{'+' if len(units) == 2 else '…'}{last}"


class RankState:
    """The current state of one rank.

    crossing_buckets   buckets that are reduced again over a second axis of the mesh
    num_slices         number of slices of a sharded unit; `num_groups`: of parts of a slice, where it is sharded again
    on_host            units whose sharded states live in host memory, and are not counted
    """

    def __init__(
        self,
        units: Iterable[UnitOutline],
        *,
        placements: Mapping[str, Placement],
        buckets: Mapping[str, tuple[str, ...]],
        crossing_buckets: Collection[str],
        num_slices: int,
        num_groups: int = 1,
        on_host: Collection[str] = (),
    ) -> None:
        self._on_host = {name for name in on_host if placements[name].grads.is_sharded}
        self.units = {unit.name: unit for unit in units}
        self.placements = placements
        self.buckets = buckets
        self.num_slices, self._num_groups = num_slices, num_groups
        self.params = {name: self._home(name, "params") for name in self.units}
        self.optim = {name: self._home(name, "optim") for name in self.units}
        self.grads: dict[str, Holding] = {}
        # Buckets that are being reduced; and those of them whose slices are in flight over a second axis of the mesh.
        self.reducing: set[str] = set()
        self.crossing: set[str] = set()
        # The last bucket of a unit: it may be reduced in pieces.
        self._last = {unit: name for name, members in buckets.items() for unit in members}
        # Unit → bytes of whole matrices, and of their gradients, that this rank updates as their owner.
        self.owned_bytes: dict[str, int] = {}
        self._crossing_buckets = crossing_buckets
        self.begin_step()

    def begin_step(self) -> None:
        """Drop the gradients, as between two steps; gathers that the last step left in flight stay so."""
        self.grads = dict.fromkeys(self.units, Holding.NOTHING)
        self.reducing.clear()
        self.crossing.clear()

    def _home(self, name: str, state: str) -> Holding:
        """Return the part that the placement says; frozen parameters have no optimizer state and no gradients."""
        if state != "params" and not self.units[name].num_trained:
            return Holding.NOTHING
        where = getattr(self.placements[name], state)
        return Holding.PART if where.is_sharded_across else Holding.SLICE if where.is_sharded else Holding.WHOLE

    def do(self, operation: Operation) -> None:
        name = operation.subject
        match operation.kind:
            case Kind.GATHER:
                # In a group of one rank there is nothing to wait for.
                self.params[name] = Holding.WHOLE if self.num_slices == 1 else Holding.ON_ITS_WAY
            case Kind.WAIT_GATHER:
                self.params[name] = Holding.WHOLE
            case Kind.FREE:
                self.params[name] = Holding.SLICE
            case Kind.BACKWARD if self.units[name].num_trained:
                self.grads[name] = Holding.DIFFERS
            case Kind.REDUCE:
                self.reducing.add(name)
                self.grads.update(dict.fromkeys(self.buckets[name], Holding.ON_ITS_WAY))
            case Kind.WAIT_REDUCE if name in self._crossing_buckets:
                # The sum over this rank's group alone is not a gradient yet.
                pass
            case Kind.REDUCE_SLICE:
                self.crossing.add(name)
            case Kind.WAIT_REDUCE | Kind.WAIT_SLICE:
                self.reducing.discard(name)
                self.crossing.discard(name)
                complete = [member for member in self.buckets[name] if self._last[member] == name]
                self.grads.update({member: self._home(member, "grads") for member in complete})
            case Kind.UPDATE:
                self._update()
            case (
                Kind.FORWARD
                | Kind.BACKWARD
                | Kind.TAKE_GRADS
                | Kind.GATHER_SLICE
                | Kind.WAIT_GATHER_SLICE
                | Kind.REDUCE_FLAGS
                | Kind.BROADCAST
                | Kind.GATHER_SCALES
            ):
                # These change nothing that is counted here.
                pass
            case Kind.TO_OWNERS:
                # Copies, in addition to the slices; all ranks own about the same number of bytes.
                self.owned_bytes[name] = operation.num_bytes // self.num_slices
            case Kind.FROM_OWNERS:
                self.owned_bytes.pop(name, None)
            case _:
                assert_never(operation.kind)

    def _update(self) -> None:
        """Mark replicated parameters that are updated in slices: they differ between ranks until they are gathered."""
        for name, placement in self.placements.items():
            if not placement.params.is_sharded and self.optim[name] is Holding.SLICE:
                self.params[name] = Holding.DIFFERS

    def holds(self) -> dict[str, dict[str, Holding]]:
        """Return params, grads, optim → unit → the part that is held now."""
        return {state: dict(getattr(self, state)) for state in STATES}

    def snapshot(self, row: Row | None, operation: Operation | None) -> Snapshot:
        holds = self.holds()
        held_bytes = sum(self._bytes(name, holds) for name in self.units) + sum(self.owned_bytes.values())
        return Snapshot(row=row, operation=operation, holds=holds, held_bytes=held_bytes)

    def _bytes(self, name: str, holds: Mapping[str, Mapping[str, Holding]]) -> int:
        unit = self.units[name]
        params, grads = unit.num_params * _FP32_BYTES, unit.num_trained * _FP32_BYTES
        is_crossing = self._last.get(name) in self.crossing
        held = self._part(grads, Holding.SLICE if is_crossing else holds["grads"][name])
        if name in self._on_host:
            gathered = holds["params"][name] is not Holding.SLICE
            return held + (self._part(params, holds["params"][name]) if gathered else 0)
        held += self._part(_NUM_MOMENTS * grads, holds["optim"][name])
        held += self._part(params, holds["params"][name])
        # Gathered parameters are a copy, in addition to the slice that the rank owns.
        if self.placements[name].params.is_sharded and holds["params"][name] is not Holding.SLICE:
            held += self._part(params, Holding.SLICE)
        return held

    def _part(self, num_bytes: int, held: Holding) -> int:
        if held is Holding.NOTHING:
            return 0
        parts = {Holding.SLICE: self.num_slices, Holding.PART: self.num_slices * self._num_groups}
        return -(-num_bytes // parts.get(held, 1))
