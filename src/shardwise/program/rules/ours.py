"""The rules of a step, written once: `rule(state, event, setting) -> (state, operations)`.

What is gathered when, how far ahead, what is freed when, how many reduces may be under way and when each is
waited for: all of it stands here and nowhere else.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from shardwise.placement import SHARDED, Placement
from shardwise.program.operations import Bucket, Kind, Operation, Trigger
from shardwise.spec import NONE, ROOT, UNANNOUNCED


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What stays the same through a step."""

    placements: Mapping[str, Placement]
    trainable: frozenset[str]
    backward: Mapping[str, str]
    inside: Mapping[str, tuple[str, ...]]
    calls: tuple[str, ...]
    backward_calls: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    gather_bytes: Mapping[str, int]
    # Of the buckets whose slices are reduced over a second axis of the mesh, and of no others.
    slice_bytes: Mapping[str, int]
    broadcasts: tuple[Operation, ...]
    flags: tuple[Operation, ...]
    prefetch: int
    reduces_in_flight: int

    def sharded(self, unit: str) -> bool:
        """Whether there is anything to gather and free."""
        return self.placements[unit].params is SHARDED and self.gather_bytes[unit] > 0

    def grads_sharded(self, bucket: Bucket) -> bool:
        return self.placements[bucket.units[0]].grads is SHARDED

    def gathered_after_update(self, unit: str) -> bool:
        """Each rank updates its slice of parameters that every rank holds whole (zero1, zero2)."""
        placement = self.placements[unit]
        updated_in_slices = placement.params is not SHARDED and placement.optim is SHARDED
        return updated_in_slices and unit in self.trainable


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What changes: which units are whole or arriving, which have arrived, and what is being reduced.

    `crossing`: the bucket whose slice is on its way over a second axis of the mesh.
    """

    whole: frozenset[str]
    arrived: frozenset[str]
    with_grads: frozenset[str] = frozenset()
    reducing: tuple[Bucket, ...] = ()
    crossing: Bucket | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """A trigger at a unit. `position` is that of the call that began last, in forward or in backward."""

    trigger: Trigger
    unit: str
    call: int = 0
    position: int = 0


Outcome = tuple[State, tuple[Operation, ...]]
Rule = Callable[[State, StepEvent, StepContext], Outcome]


def before_forward(state: State, event: StepEvent, setting: StepContext) -> Outcome:
    """Gather this unit if nobody has, then those that come next, then wait for this one."""
    state, operations = _gather_and_wait(state, event.unit, setting.calls[event.position + 1 :], setting)
    broadcasts = setting.broadcasts if event.unit == ROOT else ()
    return state, (*broadcasts, *operations, Operation(kind=Kind.FORWARD, subject=event.unit))


def after_forward(state: State, event: StepEvent, setting: StepContext) -> Outcome:
    """Free the unit, unless it is needed at once: by the next call, or, after the last one, in backward.

    What backward comes to unannounced has to wait for it whole; what it does not come to at all is free to go.
    """
    unit = event.unit
    coming = setting.calls[event.position + 1 :]
    done = setting.backward[unit] == NONE
    soon = unit in _wanted(coming[0], coming[1:], setting) if coming else not done
    kept = unit == ROOT or setting.backward[unit] == UNANNOUNCED
    reshards = setting.placements[unit].reshard_after_forward or done
    if soon or kept or not reshards or not setting.sharded(unit):
        return state, ()
    return _free(state, unit)


def before_backward(state: State, event: StepEvent, setting: StepContext) -> Outcome:
    """As before forward, with the calls in the order of backward; what a recomputation calls, before that."""
    coming = setting.backward_calls[event.position + 1 :]
    state, operations = _gather_and_wait(state, event.unit, coming, setting)
    for unit in setting.inside.get(event.unit, ()):
        state, more = _gather_and_wait(state, unit, (), setting)
        operations += more
    return state, (*operations, Operation(kind=Kind.BACKWARD, subject=event.unit))


def grads_ready(state: State, event: StepEvent, setting: StepContext) -> Outcome:
    """The parameters have done their work; the gradients, if any, go when the whole bucket's are there."""
    operations: tuple[Operation, ...] = ()
    if setting.sharded(event.unit) and event.unit in state.whole:
        state, operations = _free(state, event.unit)
    state = replace(state, with_grads=state.with_grads | {event.unit})
    bucket = next((bucket for bucket in setting.buckets if event.unit in bucket.units), None)
    if bucket is None or not state.with_grads.issuperset(bucket.units):
        return state, operations
    state, reduces = _reduce(state, bucket, setting)
    return state, (*operations, *reduces)


def backward_done(state: State, event: StepEvent, setting: StepContext) -> Outcome:
    """What nothing made ready is reduced all the same, because other ranks do; then all is waited for."""
    operations: tuple[Operation, ...] = ()
    for bucket in setting.buckets:
        if not state.with_grads.issuperset(bucket.units):
            state, reduces = _reduce(state, bucket, setting)
            operations += reduces
    operations += setting.flags
    for unit in setting.placements:
        # A unit in the middle of which forward ended.
        if unit in state.whole and setting.sharded(unit):
            state, freed = _free(state, unit)
            operations += freed
    for bucket in state.reducing:
        state, waits = _wait_reduce(state, bucket, setting)
        operations += waits
    state, arrived = _wait_slice(state)
    return replace(state, with_grads=frozenset()), operations + arrived


def after_step(state: State, event: StepEvent, setting: StepContext) -> Outcome:
    """Update; parameters of which each rank updated a slice are gathered again, in the order of their use.

    What no forward has waited for since the last update is waited for first: the update writes into it.
    """
    late = [unit for unit in setting.placements if unit in state.whole and unit not in state.arrived]
    waits = tuple(Operation(kind=Kind.WAIT_GATHER, subject=unit) for unit in late)
    in_order_of_use = dict.fromkeys((*setting.calls, *setting.placements))
    updated = [unit for unit in in_order_of_use if setting.gathered_after_update(unit)]
    gathers = tuple(_gather(unit, setting) for unit in updated)
    state = replace(state, arrived=state.arrived - set(updated))
    return state, (*waits, Operation(kind=Kind.UPDATE, subject=ROOT), *gathers)


RULES: Mapping[Trigger, Rule] = {
    Trigger.BEFORE_FORWARD: before_forward,
    Trigger.AFTER_FORWARD: after_forward,
    Trigger.BEFORE_BACKWARD: before_backward,
    Trigger.GRADS_READY: grads_ready,
    Trigger.BACKWARD_DONE: backward_done,
    Trigger.AFTER_STEP: after_step,
}


def first_state(setting: StepContext) -> State:
    """How a step finds things: as the step before it left them."""
    replicated = frozenset(unit for unit in setting.placements if not setting.sharded(unit))
    on_their_way = {unit for unit in replicated if setting.gathered_after_update(unit)}
    return State(whole=replicated, arrived=replicated - on_their_way)


def _gather_and_wait(state: State, unit: str, coming: tuple[str, ...], setting: StepContext) -> Outcome:
    missing = [other for other in _wanted(unit, coming, setting) if other not in state.whole]
    operations = tuple(_gather(other, setting) for other in missing)
    state = replace(state, whole=state.whole | set(missing))
    if unit not in state.arrived:
        operations += (Operation(kind=Kind.WAIT_GATHER, subject=unit),)
        state = replace(state, arrived=state.arrived | {unit})
    return state, operations


def _wanted(unit: str, coming: tuple[str, ...], setting: StepContext) -> list[str]:
    """The unit that computes, and the sharded ones among the next `prefetch` that do."""
    ahead = [other for other in dict.fromkeys(coming) if setting.sharded(other)]
    return list(dict.fromkeys((unit, *ahead[: setting.prefetch])))


def _gather(unit: str, setting: StepContext) -> Operation:
    return Operation(kind=Kind.GATHER, subject=unit, num_bytes=setting.gather_bytes[unit])


def _free(state: State, unit: str) -> Outcome:
    state = replace(state, whole=state.whole - {unit}, arrived=state.arrived - {unit})
    return state, (Operation(kind=Kind.FREE, subject=unit),)


def _reduce(state: State, bucket: Bucket, setting: StepContext) -> Outcome:
    """Reduce a bucket; before that, wait for the oldest so that no more than allowed are under way.

    The bound is for memory, so it counts sharded gradients only: of those the wait frees the buffer, while the
    buffer of replicated ones stays as the gradients themselves.
    """
    operations: tuple[Operation, ...] = ()
    bounded = [other for other in state.reducing if setting.grads_sharded(other)]
    if setting.grads_sharded(bucket) and len(bounded) >= setting.reduces_in_flight:
        state, operations = _wait_reduce(state, bounded[0], setting)
    operations += (Operation(kind=Kind.REDUCE, subject=bucket.name, num_bytes=bucket.num_bytes),)
    return replace(state, reducing=(*state.reducing, bucket)), operations


def _wait_reduce(state: State, bucket: Bucket, setting: StepContext) -> Outcome:
    """Wait for a bucket; where slices cross a second axis of the mesh, send this one on, and wait for the last one.

    In this order, so that no wire stands idle between: a slice crosses while the next bucket is reduced, and at most
    two are under way at once, each of which becomes a gradient.
    """
    crosses = bucket.name in setting.slice_bytes
    sent: tuple[Operation, ...] = ()
    if crosses:
        num_bytes = setting.slice_bytes[bucket.name]
        sent = (Operation(kind=Kind.REDUCE_SLICE, subject=bucket.name, num_bytes=num_bytes),)
    state, arrived = _wait_slice(state)
    reducing = tuple(other for other in state.reducing if other != bucket)
    state = replace(state, reducing=reducing, crossing=bucket if crosses else None)
    return state, (Operation(kind=Kind.WAIT_REDUCE, subject=bucket.name), *sent, *arrived)


def _wait_slice(state: State) -> Outcome:
    if state.crossing is None:
        return state, ()
    return replace(state, crossing=None), (Operation(kind=Kind.WAIT_SLICE, subject=state.crossing.name),)
