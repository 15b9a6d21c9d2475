"""The step program → what each of its rows allocates and frees: our engine."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from shardwise.placement import SHARDED, Placement
from shardwise.plan import Plan
from shardwise.planner.memory.constants import MemoryRules
from shardwise.planner.memory.replay import Change, MemoryChange, MemoryRow, Recategorize, TakeGrads
from shardwise.planner.memory.states import UnitStates
from shardwise.planner.memory.stream_peak import StreamPeak
from shardwise.program import Kind, Operation, Row, StepProgram, Trigger, crossing_buckets
from shardwise.spec import ROOT

Key = tuple[str, str, int]
"""(trigger, unit, call)."""

Changes = Iterator[MemoryChange]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetting:
    """What the engine knows: where everything lives, in bytes, and how often each unit counts."""

    plan: Plan
    placements: Mapping[str, Placement]
    states: Mapping[str, UnitStates]
    weights: Mapping[str, int]
    rules: MemoryRules
    # Of all units, also of those that are left out.
    update_bytes: int


@dataclass(slots=True)
class _Engine:
    """The buffers that are there."""

    setting: EngineSetting
    members: Mapping[str, tuple[str, ...]]
    # The buckets whose slices are summed over a second axis of the mesh too.
    crossing: AbstractSet[str]
    with_buffer: set[str] = field(default_factory=set)

    def bucket_of(self, unit: str) -> str | None:
        return next((name for name, units in self.members.items() if unit in units), None)

    def reduce_bytes(self, bucket: str) -> int:
        return sum(self.setting.states[unit].reduce for unit in self.members[bucket])

    def slice_bytes(self, bucket: str) -> int:
        return sum(self.setting.states[unit].reduce_slice for unit in self.members[bucket])

    def more_reduce(self, bucket: str) -> int:
        """Of the units that are left out."""
        return sum(self.left_out(unit) * self.setting.states[unit].reduce for unit in self.members[bucket])

    def take_grads(self, unit: str) -> Changes:
        """The bucket's buffer comes with the first unit that has gradients for it."""
        bucket = self.bucket_of(unit)
        if bucket is not None and not self.is_kept(bucket) and not self.waits_for_grads:
            if bucket not in self.with_buffer:
                self.with_buffer.add(bucket)
                yield Change("reduce", self.reduce_bytes(bucket))
            if not self.is_sharded(bucket):
                yield Change("reduce", self.left_out(unit) * self.setting.states[unit].reduce, is_beside=True)
        yield TakeGrads(unit=unit)

    def is_sharded(self, bucket: str) -> bool:
        return self.setting.placements[self.members[bucket][0]].grads is SHARDED

    def is_kept(self, bucket: str) -> bool:
        """Whether the buffer stays from step to step."""
        return self.setting.rules.keeps_reduce_buffers and not self.is_sharded(bucket)

    @property
    def waits_for_grads(self) -> bool:
        """Whether buffers are there from an earlier pass of this step."""
        return self.setting.plan.accumulate > 1 and not self.setting.plan.accumulate_reduced

    def left_out(self, unit: str) -> int:
        return self.setting.weights.get(unit, 1) - 1

    def wait_reduce(self, bucket: str) -> Changes:
        self.with_buffer.discard(bucket)
        if bucket not in self.crossing:
            yield from self.deliver(bucket)

    def reduce_slice(self, bucket: str) -> Changes:
        yield Change("reduce", self.slice_bytes(bucket))
        yield from self.let_buffer_go(bucket)

    def deliver(self, bucket: str) -> Changes:
        """Give each owner its gradients."""
        states = self.setting.states
        units = self.members[bucket]
        new = sum(states[unit].grads for unit in units)
        more = sum(self.left_out(unit) * states[unit].grads for unit in units)
        if self.is_sharded(bucket):
            yield from self.deliver_slices(bucket, new=new)
            yield Change("grads", more, is_beside=True)
        else:
            yield from self.deliver_whole(bucket, new=new, more=more)
        if self.setting.plan.accumulate > 1 and self.setting.plan.accumulate_reduced:
            # Added to what is there, and let go.
            yield Change("grads", -new)
            yield Change("grads", -more, is_beside=True)

    def deliver_slices(self, bucket: str, *, new: int) -> Changes:
        crossed = self.slice_bytes(bucket)
        if bucket not in self.crossing:
            yield Change("grads", new)
            yield from self.let_buffer_go(bucket)
        elif crossed == new:
            # In the dtype of the gradients, which it becomes.
            yield Recategorize(before="reduce", after="grads", num_bytes=crossed)
        else:
            yield Change("grads", new)
            yield Change("reduce", -crossed)

    def deliver_whole(self, bucket: str, *, new: int, more: int) -> Changes:
        buffer, more_reduce = self.reduce_bytes(bucket), self.more_reduce(bucket)
        if self.setting.plan.reduce_dtype != "fp32":
            yield Change("grads", new)
            yield Change("grads", more, is_beside=True)
            if not self.is_kept(bucket):
                yield Change("reduce", -buffer)
                yield Change("reduce", -more_reduce, is_beside=True)
        elif not self.is_kept(bucket):
            # The buffer itself becomes the gradients.
            yield Recategorize(before="reduce", after="grads", num_bytes=buffer)
            yield Change("reduce", -more_reduce, is_beside=True)
            yield Change("grads", more_reduce, is_beside=True)

    def let_buffer_go(self, bucket: str) -> Changes:
        """Of sharded gradients, of which the slice has been copied."""
        yield Change("reduce", -self.reduce_bytes(bucket))
        if self.waits_for_grads:
            yield Change("reduce", -self.more_reduce(bucket), is_beside=True)

    def kept_of_others(self, unit: str) -> int:
        """What units that are left out keep gathered between forward and backward."""
        kept = not self.setting.placements[unit].reshard_after_forward
        return self.left_out(unit) * self.setting.states[unit].full if kept else 0

    def do(self, operation: Operation) -> Changes:
        states = self.setting.states
        match operation.kind:
            case Kind.GATHER if self.setting.placements[operation.subject].params is SHARDED:
                yield Change("gathered", states[operation.subject].full)
                yield Change("gathered", self.kept_of_others(operation.subject), is_beside=True)
            case Kind.FREE:
                yield Change("gathered", -states[operation.subject].full)
                yield Change("gathered", -self.kept_of_others(operation.subject), is_beside=True)
            case Kind.WAIT_REDUCE:
                yield from self.wait_reduce(operation.subject)
            case Kind.REDUCE_SLICE:
                yield from self.reduce_slice(operation.subject)
            case Kind.WAIT_SLICE:
                yield from self.deliver(operation.subject)
            case Kind.UPDATE:
                yield Change("other", self.setting.update_bytes)
                yield Change("other", -self.setting.update_bytes)
            case _:
                pass


def engine_rows(
    program: StepProgram, *, setting: EngineSetting, peaks: Sequence[tuple[Key, StreamPeak]]
) -> Iterator[MemoryRow]:
    """The rows of a step, in the order of the trace; without one, in that of the program."""
    crossing = crossing_buckets(program.operations())
    engine = _Engine(setting, {bucket.name: bucket.units for bucket in program.buckets}, crossing)
    rows = {(row.trigger.value, row.unit, row.call): row for row in program.rows}
    order = [key for key, _ in peaks] or list(rows)
    flows = dict(peaks)
    offload = _Offload(peaks) if setting.plan.offload_activations else None
    turns = _Turns(program, setting=setting)
    for key in order:
        row = rows.pop(key, None)
        trigger, unit, _ = key
        changes = [
            *(offload.at(key) if offload else ()),
            *_random_state(trigger, unit, setting=setting),
            *(change for due in (turns.at(row) if row else ()) for change in _changes(engine, due)),
        ]
        yield MemoryRow(
            label=f"{trigger} {unit}",
            unit=unit,
            changes=changes,
            peak=flows.get(key),
            repeats=setting.weights.get(unit, 1),
        )
    # What the trace did not come by: the update, and units that it never called.
    for row in rows.values():
        yield MemoryRow(label=f"{row.trigger.value} {row.unit}", unit=row.unit, changes=list(_changes(engine, row)))


def _random_state(trigger: str, unit: str, *, setting: EngineSetting) -> Changes:
    """A recomputation brings back the random numbers of the forward."""
    num_bytes = setting.weights.get(unit, 1) * setting.rules.random_state_bytes
    if num_bytes and setting.plan.recompute_of(unit) != "none":
        if trigger == Trigger.BEFORE_FORWARD.value:
            yield Change("other", num_bytes)
        elif trigger == Trigger.GRADS_READY.value:
            yield Change("other", -num_bytes)


def _changes(engine: _Engine, row: Row) -> Changes:
    """Gradients are taken after the parameters are freed and before anything is reduced."""
    pending = row.trigger is Trigger.GRADS_READY
    for operation in row.operations:
        if pending and operation.kind is not Kind.FREE:
            yield from engine.take_grads(row.unit)
            pending = False
        yield from engine.do(operation)
    if pending:
        yield from engine.take_grads(row.unit)


class _Turns:
    """Which rows are due when one is reached.

    Where parameters are sharded, units are closed in the program's order (engine/step/walk.py): one whose gradients are
    there early, such as a root that has only a head, waits until backward has come to the end of the units in it.
    """

    def __init__(self, program: StepProgram, *, setting: EngineSetting) -> None:
        self._rows = program.rows
        self._places = {(row.trigger, row.unit, row.call): index for index, row in enumerate(program.rows)}
        self._in_order = any(placement.params is SHARDED for placement in setting.placements.values())
        self._early: set[str] = set()
        self._next = 0

    def at(self, row: Row) -> Iterator[Row]:
        if not self._in_order or row.trigger is not Trigger.GRADS_READY:
            if row.trigger is Trigger.BACKWARD_DONE:
                yield from (late for late in self._rows if self._is_early(late))
            yield row
            self._next = self._places[row.trigger, row.unit, row.call] + 1
            return
        self._early.add(row.unit)
        while self._is_early(self._rows[self._next]):
            self._early.discard(self._rows[self._next].unit)
            yield self._rows[self._next]
            self._next += 1

    def _is_early(self, row: Row) -> bool:
        return row.trigger is Trigger.GRADS_READY and row.unit in self._early


class _Offload:
    """What a unit saves leaves when the next one's forward ends, and is back when backward comes to the next one.

    The unit that backward comes to first keeps its own (engine/activations/offload.py).
    """

    def __init__(self, peaks: Sequence[tuple[Key, StreamPeak]]) -> None:
        saved = [(key[1], peak) for key, peak in peaks if key[0] == Trigger.BEFORE_FORWARD.value and key[1] != ROOT]
        self._saved = {unit: (peak.end[0], peak.end[1]) for unit, peak in saved}
        self._order = list(dict.fromkeys(unit for unit, _ in saved))

    def at(self, key: Key) -> Iterator[Change]:
        trigger, unit, _ = key
        if unit not in self._saved:
            return
        place = self._order.index(unit)
        if place == 0:
            return
        const, per_sample = self._saved[self._order[place - 1]]
        if trigger == Trigger.AFTER_FORWARD.value:
            yield Change("activations", -const, -per_sample)
        elif trigger == Trigger.BEFORE_BACKWARD.value:
            yield Change("activations", const, per_sample)
