"""What a rank holds at each operation of a step: the program, replayed on whole units.

Counted are parameters, gradients and two fp32 moments per trainable parameter (AdamW), all in fp32. Not counted
are activations, padding, and copies that live only inside an operation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from shardwise.placement import SHARDED, Placement
from shardwise.plan import Plan
from shardwise.program import Kind, Operation, Row, StepProgram, build
from shardwise.spec import ModelSpec, UnitSpec

STATES = ("params", "grads", "optim")
_FP32_BYTES = 4
_NUM_MOMENTS = 2


class Held(Enum):
    """What a rank has of one unit's parameters, gradients or optimizer state."""

    NOTHING = "nothing"
    SLICE = "own slice"
    WHOLE = "whole"
    ON_ITS_WAY = "on its way"
    DIFFERS = "differs from rank to rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What a rank holds once an operation is issued; the first frame, before any, has none."""

    row: Row | None
    operation: Operation | None
    holds: Mapping[str, Mapping[str, Held]]
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """A step, frame by frame. `holds` of a frame maps params, grads, optim → unit → what is held of it."""

    program: StepProgram
    placements: Mapping[str, Placement]
    frames: tuple[Frame, ...]
    num_ranks: int

    @property
    def peak(self) -> Frame:
        """The first frame that holds the most."""
        return max(self.frames, key=lambda frame: frame.held_bytes)

    def sent_bytes(self, kind: Kind) -> float:
        """What a rank sends in a step for its gathers or its reduces, on a ring of n ranks.

        (n-1)/n of the bytes for an all-gather or a reduce-scatter, twice that for an all-reduce.
        """
        all_reduced = {
            bucket.name for bucket in self.program.buckets if self.placements[bucket.units[0]].grads is not SHARDED
        }
        num_bytes = sum(
            operation.num_bytes * (2 if kind is Kind.REDUCE and operation.subject in all_reduced else 1)
            for operation in self.program.operations()
            if operation.kind is kind
        )
        return num_bytes * (self.num_ranks - 1) / self.num_ranks


def hold(spec: ModelSpec, *, plan: Plan, num_ranks: int) -> Holdings:
    """Replay a step that follows on a step."""
    program = build(spec, plan=plan)
    replay = _Replay(spec, placements=plan.placements(unit.name for unit in spec.units), num_ranks=num_ranks)
    replay.members = {bucket.name: bucket.units for bucket in program.buckets}
    # The step before: what it leaves under way is what this one finds.
    for operation in program.operations():
        replay.do(operation)
    replay.drop_grads()
    frames = [replay.frame(None, None)]
    for row in program.rows:
        for operation in row.operations:
            replay.do(operation)
            frames.append(replay.frame(row, operation))
    return Holdings(program=program, placements=replay.placements, frames=tuple(frames), num_ranks=num_ranks)


class _Replay:
    """The state of one rank."""

    def __init__(self, spec: ModelSpec, *, placements: Mapping[str, Placement], num_ranks: int) -> None:
        self.units = {unit.name: unit for unit in spec.units}
        self.placements = placements
        self.num_ranks = num_ranks
        self.members: Mapping[str, tuple[str, ...]] = {}
        self.params = {name: self._home(name, "params") for name in self.units}
        self.optim = {name: self._home(name, "optim") for name in self.units}
        self.grads: dict[str, Held] = {}
        self.drop_grads()

    def _home(self, name: str, state: str) -> Held:
        """As the placement has it; frozen parameters have no optimizer state and no gradients."""
        if state != "params" and not _trainable(self.units[name]):
            return Held.NOTHING
        return Held.SLICE if getattr(self.placements[name], state) is SHARDED else Held.WHOLE

    def drop_grads(self) -> None:
        self.grads = dict.fromkeys(self.units, Held.NOTHING)

    def do(self, operation: Operation) -> None:
        name = operation.subject
        match operation.kind:
            case Kind.GATHER:
                self.params[name] = Held.ON_ITS_WAY
            case Kind.WAIT_GATHER:
                self.params[name] = Held.WHOLE
            case Kind.FREE:
                self.params[name] = Held.SLICE
            case Kind.BACKWARD if _trainable(self.units[name]):
                self.grads[name] = Held.DIFFERS
            case Kind.REDUCE:
                self.grads.update(dict.fromkeys(self.members[name], Held.ON_ITS_WAY))
            case Kind.WAIT_REDUCE:
                self.grads.update({member: self._home(member, "grads") for member in self.members[name]})
            case Kind.UPDATE:
                self._update()
            case _:
                pass

    def _update(self) -> None:
        """Whole parameters of which each rank updates its slice are, until they are gathered, nobody's."""
        for name, placement in self.placements.items():
            if placement.params is not SHARDED and self.optim[name] is Held.SLICE:
                self.params[name] = Held.DIFFERS

    def frame(self, row: Row | None, operation: Operation | None) -> Frame:
        holds = {"params": dict(self.params), "grads": dict(self.grads), "optim": dict(self.optim)}
        held_bytes = sum(self._bytes(name, holds) for name in self.units)
        return Frame(row=row, operation=operation, holds=holds, held_bytes=held_bytes)

    def _bytes(self, name: str, holds: Mapping[str, Mapping[str, Held]]) -> int:
        unit = self.units[name]
        params, grads = unit.num_params * _FP32_BYTES, _trainable(unit) * _FP32_BYTES
        held = self._part(grads, holds["grads"][name])
        held += self._part(_NUM_MOMENTS * grads, holds["optim"][name])
        held += self._part(params, holds["params"][name])
        # What is gathered is a copy beside the slice that the rank owns.
        if self.placements[name].params is SHARDED and holds["params"][name] is not Held.SLICE:
            held += self._part(params, Held.SLICE)
        return held

    def _part(self, num_bytes: int, held: Held) -> int:
        if held is Held.NOTHING:
            return 0
        return -(-num_bytes // self.num_ranks) if held is Held.SLICE else num_bytes


def _trainable(unit: UnitSpec) -> int:
    return sum(param.num_elements for param in unit.params if param.trainable)
