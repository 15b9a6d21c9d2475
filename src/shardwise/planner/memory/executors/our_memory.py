"""The memory of our engine, operation by operation of a step."""

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import assert_never

from shardwise.planner.fold import do_nothing, skipped_action
from shardwise.planner.memory.events import MemoryExecutor, MemorySetting
from shardwise.planner.memory.replay import Recategorize, TakeGrads
from shardwise.program import Bucket, Kind, Operation, Row, StepProgram, crossing_buckets
from shardwise.program.rules.context import MOST_GRADS, has_states_on_host, overdue, takes_grads
from shardwise.program.run import Action


class OurMemory(MemoryExecutor):
    """The buffers of gathered units and of buckets."""

    def __init__(self, program: StepProgram, setting: MemorySetting) -> None:
        super().__init__(program, setting)
        self._buckets = {bucket.name: bucket for bucket in program.buckets}
        self._takes = {bucket.taken_as(unit): (bucket, unit) for bucket in program.buckets for unit in bucket.units}
        # Buckets whose slices are also summed over the replicate axis of the mesh.
        self._crossing = crossing_buckets(program.operations())
        self._called: set[str] = set()
        # Gradients on their way to host memory.
        self._sent: deque[int] = deque()
        self._with_buffer: set[str] = set()
        # Whether this pass adds to what earlier ones of this step have kept.
        self._adds = setting.plan.accumulate > 1 and not setting.plan.accumulate_reduced

    def action(self, operation: Operation, row: Row) -> Action:
        name, kind = operation.subject, operation.kind
        match kind:
            case Kind.GATHER:
                return partial(self._gather, name)
            case Kind.FREE:
                return partial(self._free, name)
            case Kind.FORWARD:
                return partial(self._called.add, name)
            case Kind.TAKE_GRADS:
                return partial(self._take_grads, *self._takes[name])
            case Kind.WAIT_REDUCE:
                return partial(self._wait_reduce, self._buckets[name])
            case Kind.REDUCE_SLICE:
                return partial(self._reduce_slice, self._buckets[name])
            case Kind.WAIT_SLICE:
                return partial(self._deliver, self._buckets[name])
            case Kind.TO_OWNERS:
                return partial(self._to_owners, name, operation.num_bytes)
            case Kind.FROM_OWNERS:
                return partial(self._from_owners, name, operation.num_bytes)
            case Kind.UPDATE:
                return self._update
            case (
                Kind.WAIT_GATHER
                | Kind.GATHER_SLICE
                | Kind.WAIT_GATHER_SLICE
                | Kind.BACKWARD
                | Kind.REDUCE
                | Kind.REDUCE_FLAGS
                | Kind.BROADCAST
                | Kind.GATHER_SCALES
            ):
                # In place, in existing buffers.
                return do_nothing
            case _:
                assert_never(kind)

    def skipped(self, operation: Operation, row: Row) -> Action | None:
        return skipped_action(self, operation, row, called=self._called)

    def at_rest(self) -> Mapping[str, int]:
        """Return kept buffers, gradients of earlier passes, and the used-flags of parameters (engine/core/used.py)."""
        setting = self.setting
        found = {"grads": 0, "reduce": 0, "other": 4 * setting.num_params}
        for unit, states in setting.states.items():
            kept = setting.rules.keeps_reduce_buffers and not setting.placements[unit].grads.is_sharded
            if self._adds:
                keeps_slices = setting.placements[unit].optim.is_sharded_across
                found["reduce"] += setting.weight(unit) * (sum(states.reduce_slices) if keeps_slices else states.reduce)
            elif kept or (setting.plan.accumulate > 1 and not self._leaves_at_once(unit)):
                found["grads"] += setting.weight(unit) * (states.reduce if kept else states.grads)
        return found

    def buffers_at_rest(self) -> list[int]:
        found = self.at_rest()
        return [found["grads"], found["reduce"]]

    # Parameters

    def _gather(self, unit: str) -> None:
        if self.setting.placements[unit].params.is_sharded and unit not in self._gathered:
            self._gathered.add(unit)
            self._change("gathered", *self._gathered_bytes(unit))

    # Gradients

    def _take_grads(self, bucket: Bucket, unit: str) -> None:
        """Allocate the bucket's buffer for the first unit that has gradients for it."""
        if not self._is_kept(bucket) and not self._has_buffer(bucket):
            if bucket.name not in self._with_buffer:
                self._with_buffer.add(bucket.name)
                self._change("reduce", self._buffer_bytes(bucket)[0])
            if not self._is_sharded(bucket):
                self._change("reduce", 0, self._bytes("reduce", (unit,))[1])
        if bucket.is_last:
            self.changes.append(TakeGrads(unit=unit))

    def _wait_reduce(self, bucket: Bucket) -> None:
        self._with_buffer.discard(bucket.name)
        if bucket.name not in self._crossing:
            self._deliver(bucket)

    def _reduce_slice(self, bucket: Bucket) -> None:
        if not self._has_slice(bucket):
            self._change("reduce", self._crossing_bytes(bucket)[0])
        self._release_buffer(bucket)

    def _deliver(self, bucket: Bucket) -> None:
        """Give each owner its gradients."""
        grads, others = self._bytes("grads", bucket.units)
        if self._is_sharded(bucket):
            self._deliver_slices(bucket, grads, others)
        else:
            self._deliver_replicated(bucket, grads, others)
        summed = self.setting.plan.accumulate > 1 and self.setting.plan.accumulate_reduced
        if summed and bucket.is_last and not self._leaves_at_once(bucket.units[0]):
            # Added to those of earlier passes, and freed.
            self._change("grads", -grads, -others)

    def _deliver_slices(self, bucket: Bucket, grads: int, others: int) -> None:
        crosses, unit = bucket.name in self._crossing, bucket.units[0]
        (crossed, of_others), leaves = self._crossing_bytes(bucket), self._leaves_at_once(unit)
        if crosses and crossed == grads and not leaves and self._has_slice(bucket):
            self.changes.append(Recategorize(before="reduce", after="grads", num_bytes=crossed, others=others))
            return
        if crosses and crossed == grads and not leaves:
            # The slice has the dtype of the gradients, and becomes them.
            self.changes.append(Recategorize(before="reduce", after="grads", num_bytes=crossed))
            self._change("grads", 0, others)
            return
        if not bucket.piece:
            # For all pieces.
            self._change("grads", grads, 0 if leaves else others)
        if leaves and bucket.is_last and self._is_on_host(unit):
            self._send(grads)
        elif leaves and bucket.is_last:
            self._change("grads", -grads)
        if crosses:
            self._change("reduce", -crossed, -of_others if self._has_slice(bucket) else 0)
        else:
            self._release_buffer(bucket)

    def _leaves_at_once(self, unit: str) -> bool:
        return takes_grads(unit, plan=self.setting.plan, placement=self.setting.placements[unit])

    def _is_on_host(self, unit: str) -> bool:
        return has_states_on_host(unit, plan=self.setting.plan, placement=self.setting.placements[unit])

    def _send(self, grads: int) -> None:
        """Keep gradients that leave for host memory, or that updates of states there read, until a few more follow.

        Units on the device do not count: where they come last, the gradients are still there when backward ends. (A run
        keeps them until their units are gathered again, early in the next step, where the peak is not.)
        """
        self._sent.append(grads)
        for earlier in overdue(self._sent, most=MOST_GRADS):
            self._change("grads", -earlier)

    def _update(self) -> None:
        for earlier in overdue(self._sent, most=0):
            self._change("grads", -earlier)
        super()._update()

    def _deliver_replicated(self, bucket: Bucket, grads: int, others: int) -> None:
        buffer, other_buffers = self._buffer_bytes(bucket)
        if self.setting.plan.reduce_dtype != "fp32":
            self._change("grads", grads, others)
            if not self._is_kept(bucket):
                self._change("reduce", -buffer, -other_buffers)
        elif not self._is_kept(bucket):
            # The buffer itself becomes the gradients.
            self.changes.append(Recategorize(before="reduce", after="grads", num_bytes=buffer, others=other_buffers))

    def _release_buffer(self, bucket: Bucket) -> None:
        """Free the buffer of sharded gradients after the slice was copied."""
        buffer, others = self._buffer_bytes(bucket)
        self._change("reduce", -buffer, -others if self._has_buffer(bucket) else 0)

    def _is_sharded(self, bucket: Bucket) -> bool:
        return self.setting.placements[bucket.units[0]].grads.is_sharded

    def _is_kept(self, bucket: Bucket) -> bool:
        """Return whether the buffer is kept from step to step."""
        return self.setting.rules.keeps_reduce_buffers and not self._is_sharded(bucket)

    def _buffer_bytes(self, bucket: Bucket) -> tuple[int, int]:
        """Return the bytes of a bucket's buffer, and those of the units that its units stand for."""
        states = self.setting.states
        sizes = [self.setting.with_others(states[unit].reduces[bucket.piece], unit) for unit in bucket.units]
        return sum(size for size, _ in sizes), sum(others for _, others in sizes)

    def _has_slice(self, bucket: Bucket) -> bool:
        """Return whether earlier passes have left the slice of a bucket, summed over the shard axis."""
        return self._adds and self.setting.placements[bucket.units[0]].optim.is_sharded_across

    def _has_buffer(self, bucket: Bucket) -> bool:
        """Return whether earlier passes have left the buffer of a bucket."""
        return self._adds and not self._has_slice(bucket)

    def _crossing_bytes(self, bucket: Bucket) -> tuple[int, int]:
        """Return the bytes of this rank's slice of a bucket's buffer, and of the units that its units stand for."""
        states = self.setting.states
        sizes = [self.setting.with_others(states[unit].reduce_slices[bucket.piece], unit) for unit in bucket.units]
        return sum(size for size, _ in sizes), sum(others for _, others in sizes)

    # Matrices with owners

    def _to_owners(self, unit: str, num_bytes: int) -> None:
        """Send slices of values and gradients; assemble the received ones, and free them."""
        owned = 2 * self.setting.owned.get(unit, 0)
        received = owned // self.setting.weight(unit)
        self._change("other", received)
        self._allocate_briefly(num_bytes // self.setting.num_slices)
        self._own(unit, owned)
        self._change("other", -received)

    def _from_owners(self, unit: str, num_bytes: int) -> None:
        """Send new values and receive them in slices; free the unsharded matrices."""
        owned = self.setting.owned.get(unit, 0)
        self._allocate_briefly(owned // self.setting.weight(unit) + num_bytes // self.setting.num_slices)
        self._own(unit, -2 * owned)

    def _own(self, unit: str, num_bytes: int) -> None:
        one = num_bytes // self.setting.weight(unit)
        self._change("other", one, num_bytes - one)
