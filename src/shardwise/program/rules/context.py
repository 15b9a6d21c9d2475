"""The context that all rules are given, and a set of rules: `rule(state, event, context) -> (state, operations)`.

Engine and planner follow what is said here of host memory, and of when the optimizer steps a unit:

states       of units with sharded gradients, by plan
gradients    go to the CPU, or are read by an update of states there; a few at a time, or the device would hold them all
activations  of a unit leave while the next one's forward runs, and return while its backward does; the last ones stay
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from shardwise.plan import Plan
from shardwise.plan.placement import Placement
from shardwise.program.operations import OF_A_STEP, Bucket, Kind, Operation, Trigger
from shardwise.program.spec import ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """The facts that stay the same through a step.

    from_root     units that `auto` has taken out of the root (UnitSpec.from_root)
    inside        recomputed unit → the units that its recomputation calls
    calls         the order of forward; `backward_calls` that of backward
    update_gather_bytes   bytes of each unit that are gathered after an update, where ranks update slices
    owned_bytes   bytes of each unit's matrices with an owner, in the dtype in which they are stepped
    slice_bytes   only of buckets whose slices are reduced over a second axis of the mesh
    num_slices    ranks of the shard axis
    broadcasts, scales   at the start of each forward: buffers of rank 0, and scales of weights that are gathered in fp8
    reduces       whether this pass reduces its gradients, or keeps them for a later pass
    alone         whether this rank is the only one of the job; `alone_on_shard`: the only one on its shard axis
    on_host       units whose slices come from host memory, so that even a rank alone waits for a gather
    """

    placements: Mapping[str, Placement]
    trainable: frozenset[str]
    backward: Mapping[str, str]
    from_root: frozenset[str]
    inside: Mapping[str, tuple[str, ...]]
    calls: tuple[str, ...]
    backward_calls: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    gather_bytes: Mapping[str, int]
    update_gather_bytes: Mapping[str, int]
    owned_bytes: Mapping[str, int]
    slice_bytes: Mapping[str, int]
    num_slices: int
    broadcasts: tuple[Operation, ...]
    scales: tuple[Operation, ...]
    flags: Operation
    reduces: bool
    prefetch: int
    reduces_in_flight: int
    alone: bool
    alone_on_shard: bool
    on_host: frozenset[str]

    @property
    def at_start(self) -> tuple[Operation, ...]:
        """The operations with which each forward starts."""
        return (*self.broadcasts, *self.scales)

    def gather(self, unit: str) -> Operation:
        """Return the gather of a unit's parameters."""
        return self._gather(unit, self.gather_bytes[unit])

    def gather_updated(self, unit: str) -> Operation:
        """Return the gather of the parameters that an update has changed."""
        return self._gather(unit, self.update_gather_bytes[unit])

    def gather_slice(self, unit: str, *, num_bytes: int) -> Operation:
        """Return the gather of this rank's slice over the replicate axis, where each rank has written a part of it."""
        return Operation(kind=Kind.GATHER_SLICE, subject=unit, num_bytes=-(-num_bytes // self.num_slices))

    def _gather(self, unit: str, num_bytes: int) -> Operation:
        return Operation(kind=Kind.GATHER, subject=unit, num_bytes=num_bytes, is_local=self.alone_on_shard)

    def is_at_once(self, unit: str) -> bool:
        """Return whether a gather of the unit needs no wait: it is a copy on this rank's device."""
        return self.alone_on_shard and unit not in self.on_host

    def reduce(self, bucket: Bucket) -> Operation:
        """Return the reduce of a bucket: over the shard axis if its gradients are sharded, else over all ranks."""
        is_local = self.alone_on_shard if self.grads_sharded(bucket) else self.alone
        return Operation(kind=Kind.REDUCE, subject=bucket.name, num_bytes=bucket.num_bytes, is_local=is_local)

    def sharded(self, unit: str) -> bool:
        """Return whether there is anything to gather and free."""
        return self.placements[unit].params.is_sharded and self.gather_bytes[unit] > 0

    def grads_sharded(self, bucket: Bucket) -> bool:
        return self.placements[bucket.units[0]].grads.is_sharded

    def is_reduced(self, bucket: Bucket) -> bool:
        """Return whether this pass reduces a bucket: if not over all axes, then over the shard axis, so that what is
        kept for a later pass is a slice. That of one rank is all, which is summed unrounded in the buffer itself.
        """
        return self.reduces or (self.optim_crosses(bucket.units[0]) and not self.alone_on_shard)

    def optim_crosses(self, unit: str) -> bool:
        """Return whether ranks of the replicate axis update parts of one slice."""
        return self.placements[unit].optim.is_sharded_across

    def bucket_of(self, unit: str) -> Bucket | None:
        return next(iter(self.buckets_of(unit)), None)

    def buckets_of(self, unit: str) -> tuple[Bucket, ...]:
        """Return the bucket of a unit, or the pieces in which it is reduced; none if it has no gradients."""
        return tuple(bucket for bucket in self.buckets if unit in bucket.units)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent:
    """A trigger at a unit. `position` is that of the call that began last, in forward or in backward."""

    trigger: Trigger
    unit: str
    call: int = 0
    position: int = 0


Rule = Callable[[Any, StepEvent, StepContext], tuple[Any, tuple[Operation, ...]]]
"""(state, event, context) → (the state after it, operations)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules by which one engine turns triggers into operations. A step begins with `first_state`."""

    name: str
    by_trigger: Mapping[Trigger, Rule]
    first_state: Callable[[StepContext], Any]


def one_per_trigger(*rules: Rule) -> Mapping[Trigger, Rule]:
    """Return trigger → rule; the rules come in the order of OF_A_STEP."""
    return MappingProxyType(dict(zip(OF_A_STEP, rules, strict=True)))


def update_only(state: Any, event: StepEvent, context: StepContext) -> tuple[Any, tuple[Operation, ...]]:
    """Update, as the rule after a step with nothing to gather again."""
    return state, (Operation(kind=Kind.UPDATE, subject=ROOT),)


MOST_GRADS = 2
"""Gradients of flat buffers that are on their way at once; the device waits for earlier ones."""

MOST_SAVED = 1
"""Units whose activations are on their way when a forward ends."""

Item = TypeVar("Item")


def has_states_on_host(unit: str, *, plan: Plan, placement: Placement) -> bool:
    """Return whether the states of a unit live in host memory."""
    return placement.grads.is_sharded and plan.has_states_on_host(unit)


def overdue(under_way: deque[Item], *, most: int) -> Iterator[Item]:
    """Take off, oldest first, what must have arrived before anything else leaves: `most` may be on their way."""
    while len(under_way) > most:
        yield under_way.popleft()


def saved_before(unit: str, *, saving: Sequence[str]) -> str | None:
    """Return the unit that saves before this one: what it has saved is away from this one's forward to its backward."""
    place = saving.index(unit) if unit in saving else 0
    return saving[place - 1] if place else None


def is_in_backward(plan: Plan, placement: Placement) -> bool:
    """Return whether a unit is stepped inside backward, as soon as its gradients are averaged."""
    return plan.updates_in_backward and placement.grads.is_sharded


def takes_grads(unit: str, *, plan: Plan, placement: Placement) -> bool:
    """Return whether averaged gradients leave the device, or are used and freed, before backward ends."""
    by_cpu = plan.offload_update == "host" and has_states_on_host(unit, plan=plan, placement=placement)
    return by_cpu or is_in_backward(plan, placement)
