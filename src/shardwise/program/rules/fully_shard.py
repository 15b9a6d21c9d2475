"""The rules of torch's `fully_shard`, on each unit and on the root, as engine/torch_engine/prepare.py sets it up.

Read from torch 2.11 to 2.13: torch/distributed/fsdp/_fully_shard (_fsdp_state.py, _fsdp_param_group.py,
_fsdp_collectives.py).

gather        fills a flat buffer, out of which `wait gather` copies the parameters
forward       A unit is gathered when its own forward begins. Its flat buffer stays until the next unit's is copied
              out, the last one until the root's forward ends: hence a second wait for it there. The root is not freed.
backward      When the backward of a unit begins, the unit whose forward ended before it is gathered ahead.
gradients     When a unit's are ready, it is freed, the last reduce is waited for, and only then are they taken: one
              reduce runs at a time. Over a second axis of the mesh their slices are summed at once, in a stream that
              backward waits for at its end. The root's are the last.
"""

from dataclasses import dataclass, replace

from shardwise.program.operations import Bucket, Kind, Operation
from shardwise.program.rules.context import Rules, StepContext, StepEvent, one_per_trigger, update_only
from shardwise.program.spec import ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class FullyShardState:
    """The state of a step.

    whole      units that have been copied out of their flat buffers
    ahead      units whose flat buffers are filled, and that have not been
    left       the unit whose flat buffer forward has left
    forwards   units in the order in which their forwards ended
    done       units whose gradients have been taken
    """

    whole: frozenset[str] = frozenset()
    ahead: frozenset[str] = frozenset()
    left: str | None = None
    forwards: tuple[str, ...] = ()
    done: frozenset[str] = frozenset()
    reducing: Bucket | None = None


Outcome = tuple[FullyShardState, tuple[Operation, ...]]


def before_forward(state: FullyShardState, event: StepEvent, context: StepContext) -> Outcome:
    computes = Operation(kind=Kind.FORWARD, subject=event.unit)
    if event.unit in state.whole or not context.sharded(event.unit):
        return state, (computes,)
    state = replace(state, whole=state.whole | {event.unit}, left=event.unit)
    return state, (context.gather(event.unit), _wait(event.unit), computes)


def after_forward(state: FullyShardState, event: StepEvent, context: StepContext) -> Outcome:
    unit = event.unit
    if context.sharded(unit):
        state = replace(state, forwards=(*state.forwards, unit))
    if unit == ROOT:
        return replace(state, left=None), (_wait(state.left),) if state.left is not None else ()
    if unit in state.whole and context.placements[unit].reshard_after_forward:
        return _free(state, unit)
    return state, ()


def before_backward(state: FullyShardState, event: StepEvent, context: StepContext) -> Outcome:
    unit = event.unit
    operations: tuple[Operation, ...] = ()
    if unit not in state.whole and context.sharded(unit):
        operations += () if unit in state.ahead else (context.gather(unit),)
        operations += (_wait(unit),)
        state = replace(state, whole=state.whole | {unit}, ahead=state.ahead - {unit})
    target = _before(state, event)
    if target is not None and target not in state.whole | state.ahead:
        state = replace(state, ahead=state.ahead | {target})
        operations += (context.gather(target),)
    return state, (*operations, Operation(kind=Kind.BACKWARD, subject=unit))


def grads_ready(state: FullyShardState, event: StepEvent, context: StepContext) -> Outcome:
    """Take the gradients, but the root's and those of units without a bucket only when backward is done."""
    bucket = context.bucket_of(event.unit)
    if event.unit == ROOT or bucket is None:
        return state, ()
    return _take(state, event.unit, bucket, context)


def backward_done(state: FullyShardState, event: StepEvent, context: StepContext) -> Outcome:
    operations: tuple[Operation, ...] = ()
    for unit in context.placements:
        if unit not in state.done:
            state, taken = _take(state, unit, context.bucket_of(unit), context)
            operations += taken
    last = state.reducing
    if last is not None:
        operations += (Operation(kind=Kind.WAIT_REDUCE, subject=last.name),)
        if last.name in context.slice_bytes:
            operations += (Operation(kind=Kind.WAIT_SLICE, subject=last.name),)
    return FullyShardState(), operations


FULLY_SHARD = Rules(
    name="fully_shard",
    by_trigger=one_per_trigger(before_forward, after_forward, before_backward, grads_ready, backward_done, update_only),
    first_state=lambda context: FullyShardState(),
)


def _wait(unit: str) -> Operation:
    return Operation(kind=Kind.WAIT_GATHER, subject=unit)


def _free(state: FullyShardState, unit: str) -> Outcome:
    return replace(state, whole=state.whole - {unit}), (Operation(kind=Kind.FREE, subject=unit),)


def _before(state: FullyShardState, event: StepEvent) -> str | None:
    """Return the unit whose forward ended before that of this call."""
    places = [place for place, unit in enumerate(state.forwards) if unit == event.unit]
    if event.call >= len(places) or places[event.call] == 0:
        return None
    return state.forwards[places[event.call] - 1]


def _take(state: FullyShardState, unit: str, bucket: Bucket | None, context: StepContext) -> Outcome:
    """Free a unit after its backward, take its gradients and reduce them, one unit at a time."""
    state = replace(state, done=state.done | {unit})
    operations: tuple[Operation, ...] = ()
    if unit in state.whole:
        state, operations = _free(state, unit)
    if bucket is None:
        return state, operations
    if state.reducing is not None:
        operations += (Operation(kind=Kind.WAIT_REDUCE, subject=state.reducing.name),)
    operations += (Operation(kind=Kind.TAKE_GRADS, subject=unit),)
    if not context.reduces:
        return state, operations
    operations += (context.reduce(bucket),)
    if bucket.name in context.slice_bytes:
        num_bytes = context.slice_bytes[bucket.name]
        operations += (Operation(kind=Kind.REDUCE_SLICE, subject=bucket.name, num_bytes=num_bytes),)
    return replace(state, reducing=bucket), operations
