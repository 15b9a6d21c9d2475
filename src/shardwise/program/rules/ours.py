"""Our engine's rules of a step: when units are gathered and freed, and how many reduces run at once."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

from shardwise.program.operations import Bucket, Kind, Operation
from shardwise.program.rules.context import Rules, StepContext, StepEvent, one_per_trigger
from shardwise.program.spec import NONE, ROOT, UNANNOUNCED


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of a step: units that are whole or arriving, those that have arrived, and buckets being reduced.

    `crossing`: the bucket whose slice is being reduced over a second axis of the mesh. `returning`: units whose updated
    slices are being gathered over it.
    """

    whole: frozenset[str]
    arrived: frozenset[str]
    with_grads: frozenset[str] = frozenset()
    reducing: tuple[Bucket, ...] = ()
    crossing: Bucket | None = None
    returning: frozenset[str] = frozenset()


Outcome = tuple[State, tuple[Operation, ...]]


def before_forward(state: State, event: StepEvent, context: StepContext) -> Outcome:
    """Gather this unit unless it is gathered, then those that come next, then wait for this one."""
    at_start: tuple[Operation, ...] = ()
    if event.unit == ROOT:
        # Scales are those of all slices.
        for unit in context.placements if context.scales else ():
            state, arrived = _wait_gather_slice(state, unit)
            at_start += arrived
        at_start += context.at_start
    state, operations = _gather_and_wait(state, event.unit, context.calls[event.position + 1 :], context)
    return state, (*at_start, *operations, Operation(kind=Kind.FORWARD, subject=event.unit))


def after_forward(state: State, event: StepEvent, context: StepContext) -> Outcome:
    """Free the unit, unless it is needed at once: by the next call, or, after the last one, in backward.

    A head is not: the loss lies between, with the most activations of the step. A unit whose backward is unannounced
    stays gathered for it; one without a backward is freed in any case.
    """
    unit = event.unit
    coming = context.calls[event.position + 1 :]
    done = context.backward[unit] == NONE
    soon = unit in _wanted(coming[0], coming[1:], context) if coming else not done and unit not in context.from_root
    kept = unit == ROOT or context.backward[unit] == UNANNOUNCED
    reshards = context.placements[unit].reshard_after_forward or done
    if soon or kept or not reshards or not context.sharded(unit):
        return state, ()
    return _free(state, unit)


def before_backward(state: State, event: StepEvent, context: StepContext) -> Outcome:
    """Gather as before forward, in the order of backward, and the units that a recomputation calls."""
    coming = context.backward_calls[event.position + 1 :]
    state, operations = _gather_and_wait(state, event.unit, coming, context)
    for unit in context.inside.get(event.unit, ()):
        state, more = _gather_and_wait(state, unit, (), context)
        operations += more
    return state, (*operations, Operation(kind=Kind.BACKWARD, subject=event.unit))


def grads_ready(state: State, event: StepEvent, context: StepContext) -> Outcome:
    """Free the parameters and take the gradients; reduce the bucket when it is complete.

    The next piece of a large unit is taken while the previous one is reduced.
    """
    operations: tuple[Operation, ...] = ()
    if context.sharded(event.unit) and event.unit in state.whole:
        state, operations = _free(state, event.unit)
    state = replace(state, with_grads=state.with_grads | {event.unit})
    for bucket in context.buckets_of(event.unit):
        operations += (_take(bucket, event.unit),)
        if context.is_reduced(bucket) and state.with_grads.issuperset(bucket.units):
            state, reduces = _reduce(state, bucket, context)
            operations += reduces
    return state, operations


def backward_done(state: State, event: StepEvent, context: StepContext) -> Outcome:
    """Take and reduce the gradients that never became ready too, because other ranks do; then wait for all."""
    operations: tuple[Operation, ...] = ()
    for bucket in context.buckets:
        missing = [unit for unit in bucket.units if unit not in state.with_grads]
        operations += tuple(_take(bucket, unit) for unit in missing)
        if missing and context.is_reduced(bucket):
            state, reduces = _reduce(state, bucket, context)
            operations += reduces
    operations += (context.flags,) if context.reduces else ()
    for unit in context.placements:
        # A unit in the middle of which forward ended.
        if unit in state.whole and context.sharded(unit):
            state, freed = _free(state, unit)
            operations += freed
    for bucket in state.reducing:
        state, waits = _wait_reduce(state, bucket, context)
        operations += waits
    state, arrived = _wait_slice(state)
    return replace(state, with_grads=frozenset()), operations + arrived


def after_step(state: State, event: StepEvent, context: StepContext) -> Outcome:
    """Update; parameters of which each rank updated a slice are gathered again, in the order of their use.

    Matrices are sent to their owners first, and back before anything is gathered. A gather that no forward has waited
    for since the last update is waited for first: the update writes into its buffer.
    """
    late = [unit for unit in context.placements if unit in state.whole and unit not in state.arrived]
    waits = tuple(Operation(kind=Kind.WAIT_GATHER, subject=unit) for unit in late)
    for unit in context.placements:
        state, arrived = _wait_gather_slice(state, unit)
        waits += arrived
    in_order_of_use = dict.fromkeys((*context.calls, *context.placements))
    updated = [unit for unit in in_order_of_use if _gathered_after_update(unit, context)]
    returning = [unit for unit in in_order_of_use if unit in _returning(context)]
    gathers = tuple(context.gather_updated(unit) for unit in updated)
    gathers += tuple(context.gather_slice(unit, num_bytes=context.update_gather_bytes[unit]) for unit in returning)
    owned = [(unit, num_bytes) for unit, num_bytes in context.owned_bytes.items() if num_bytes]
    # The values and the gradients.
    there = tuple(_moved(Kind.TO_OWNERS, unit, 2 * size, context) for unit, size in owned)
    back = tuple(_moved(Kind.FROM_OWNERS, unit, size, context) for unit, size in owned)
    state = replace(state, arrived=state.arrived - _under_way(updated, context), returning=frozenset(returning))
    return state, (*waits, *there, Operation(kind=Kind.UPDATE, subject=ROOT), *back, *gathers)


def first_state(context: StepContext) -> State:
    """Return the state that the previous step left."""
    replicated = frozenset(unit for unit in context.placements if not context.sharded(unit))
    updated = [unit for unit in replicated if _gathered_after_update(unit, context)]
    arrived = replicated - _under_way(updated, context)
    return State(whole=replicated, arrived=arrived, returning=_returning(context))


OURS = Rules(
    name="shardwise",
    by_trigger=one_per_trigger(before_forward, after_forward, before_backward, grads_ready, backward_done, after_step),
    first_state=first_state,
)


def _gathered_after_update(unit: str, context: StepContext) -> bool:
    """Return whether each rank updates a slice of parameters that every rank holds whole (zero1, zero2)."""
    placement = context.placements[unit]
    updated_in_slices = not placement.params.is_sharded and placement.optim.is_sharded
    return updated_in_slices and unit in context.trainable


def _returning(context: StepContext) -> frozenset[str]:
    """Return the units whose slices are gathered over the replicate axis after an update."""
    return frozenset(unit for unit in context.trainable if context.optim_crosses(unit))


def _gather_and_wait(state: State, unit: str, coming: tuple[str, ...], context: StepContext) -> Outcome:
    missing = [other for other in _wanted(unit, coming, context) if other not in state.whole]
    operations: tuple[Operation, ...] = ()
    for other in missing:
        state, returned = _wait_gather_slice(state, other)
        operations += (*returned, context.gather(other))
    arrived = state.arrived | (set(missing) - _under_way(missing, context))
    state = replace(state, whole=state.whole | set(missing), arrived=arrived)
    if unit not in state.arrived:
        operations += (Operation(kind=Kind.WAIT_GATHER, subject=unit),)
        state = replace(state, arrived=state.arrived | {unit})
    return state, operations


def _wanted(unit: str, coming: tuple[str, ...], context: StepContext) -> list[str]:
    """Return the unit that computes, and the next `prefetch` sharded ones."""
    ahead = islice((other for other in dict.fromkeys(coming) if context.sharded(other)), context.prefetch)
    return list(dict.fromkeys((unit, *ahead)))


def _under_way(gathered: Iterable[str], context: StepContext) -> set[str]:
    """Return the gathered units that must be waited for."""
    return {unit for unit in gathered if not context.is_at_once(unit)}


def _moved(kind: Kind, unit: str, num_bytes: int, context: StepContext) -> Operation:
    return Operation(kind=kind, subject=unit, num_bytes=num_bytes, is_local=context.alone_on_shard)


def _free(state: State, unit: str) -> Outcome:
    state = replace(state, whole=state.whole - {unit}, arrived=state.arrived - {unit})
    return state, (Operation(kind=Kind.FREE, subject=unit),)


def _take(bucket: Bucket, unit: str) -> Operation:
    return Operation(kind=Kind.TAKE_GRADS, subject=bucket.taken_as(unit))


def _reduce(state: State, bucket: Bucket, context: StepContext) -> Outcome:
    """Reduce a bucket; before that, wait for the oldest if as many as allowed are in flight.

    The bound is for memory, so only sharded gradients count: the wait frees their buffer, while the buffer of
    replicated ones becomes the gradients.
    """
    operations: tuple[Operation, ...] = ()
    bounded = [other for other in state.reducing if context.grads_sharded(other)]
    if context.grads_sharded(bucket) and len(bounded) >= context.reduces_in_flight:
        state, operations = _wait_reduce(state, bounded[0], context)
    return replace(state, reducing=(*state.reducing, bucket)), (*operations, context.reduce(bucket))


def _wait_reduce(state: State, bucket: Bucket, context: StepContext) -> Outcome:
    """Wait for a bucket; on a mesh with a second axis, reduce its slice there, and wait for the previous slice.

    In this order no link is idle in between: a slice is reduced while the next bucket is, and at most two slices are
    in flight.
    """
    crosses = bucket.name in context.slice_bytes and context.reduces
    sent: tuple[Operation, ...] = ()
    if crosses:
        num_bytes = context.slice_bytes[bucket.name]
        sent = (Operation(kind=Kind.REDUCE_SLICE, subject=bucket.name, num_bytes=num_bytes),)
    state, arrived = _wait_slice(state)
    reducing = tuple(other for other in state.reducing if other != bucket)
    state = replace(state, reducing=reducing, crossing=bucket if crosses else None)
    return state, (Operation(kind=Kind.WAIT_REDUCE, subject=bucket.name), *sent, *arrived)


def _wait_slice(state: State) -> Outcome:
    if state.crossing is None:
        return state, ()
    return replace(state, crossing=None), (Operation(kind=Kind.WAIT_SLICE, subject=state.crossing.name),)


def _wait_gather_slice(state: State, unit: str) -> Outcome:
    if unit not in state.returning:
        return state, ()
    return replace(state, returning=state.returning - {unit}), (Operation(kind=Kind.WAIT_GATHER_SLICE, subject=unit),)
