"""The rules of torch's DistributedDataParallel, as engine/torch_engine/prepare.py sets it up.

Read from torch 2.11 to 2.13: torch/csrc/distributed/c10d/reducer.cpp, torch/nn/parallel/distributed.py. Every gradient
is copied into its bucket as soon as autograd has made it. A bucket is all-reduced when it is complete and all buckets
before it were issued; backward ends after the wait for all.
"""

from dataclasses import dataclass, replace

from shardwise.program.operations import Bucket, Kind, Operation
from shardwise.program.rules.context import Rules, StepContext, StepEvent, one_per_trigger, update_only
from shardwise.program.spec import ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpState:
    with_grads: frozenset[str] = frozenset()
    reducing: tuple[Bucket, ...] = ()


Outcome = tuple[DdpState, tuple[Operation, ...]]


def before_forward(state: DdpState, event: StepEvent, context: StepContext) -> Outcome:
    """Broadcast the buffers of rank 0 at the start of each forward."""
    broadcasts = context.broadcasts if event.unit == ROOT else ()
    return state, (*broadcasts, Operation(kind=Kind.FORWARD, subject=event.unit))


def after_forward(state: DdpState, event: StepEvent, context: StepContext) -> Outcome:
    return state, ()


def before_backward(state: DdpState, event: StepEvent, context: StepContext) -> Outcome:
    return state, (Operation(kind=Kind.BACKWARD, subject=event.unit),)


def grads_ready(state: DdpState, event: StepEvent, context: StepContext) -> Outcome:
    bucket = context.bucket_of(event.unit)
    if bucket is None:
        return state, ()
    state = replace(state, with_grads=state.with_grads | {event.unit})
    taken = Operation(kind=Kind.TAKE_GRADS, subject=event.unit)
    if not context.reduces or not state.with_grads.issuperset(bucket.units):
        return state, (taken,)
    state, reduced = _reduce(state, bucket, context)
    return state, (taken, *reduced)


def backward_done(state: DdpState, event: StepEvent, context: StepContext) -> Outcome:
    operations: tuple[Operation, ...] = ()
    for bucket in context.buckets:
        missing = [unit for unit in bucket.units if unit not in state.with_grads]
        operations += tuple(Operation(kind=Kind.TAKE_GRADS, subject=unit) for unit in missing)
        if missing and context.reduces:
            state, reduced = _reduce(state, bucket, context)
            operations += reduced
    waits = tuple(Operation(kind=Kind.WAIT_REDUCE, subject=bucket.name) for bucket in state.reducing)
    return DdpState(), operations + waits


DDP = Rules(
    name="ddp",
    by_trigger=one_per_trigger(before_forward, after_forward, before_backward, grads_ready, backward_done, update_only),
    first_state=lambda context: DdpState(),
)


def _reduce(state: DdpState, bucket: Bucket, context: StepContext) -> Outcome:
    return replace(state, reducing=(*state.reducing, bucket)), (context.reduce(bucket),)
