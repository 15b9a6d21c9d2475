"""The context that all rules are given, and a set of rules: `rule(state, event, context) -> (state, operations)`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from shardwise.plan.placement import Placement
from shardwise.program.operations import OF_A_STEP, Bucket, Kind, Operation, Trigger
from shardwise.spec import ROOT


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
