"""What our engine allocates and frees for each operation of a step."""

from collections.abc import Mapping
from functools import partial
from typing import assert_never

from shardwise.plan.placement import SHARDED
from shardwise.planner.memory.executors.setting import MemorySetting, update_changes
from shardwise.planner.memory.replay import Change, MemoryChange, Recategorize, TakeGrads
from shardwise.planner.trace_order import do_nothing
from shardwise.program import Kind, Operation, Row, StepProgram, crossing_buckets
from shardwise.program.compiled_program import Action


class OurMemory:
    """The buffers that are there."""

    def __init__(self, program: StepProgram, setting: MemorySetting) -> None:
        self.setting = setting
        self.changes: list[MemoryChange] = []
        self.ready: set[str] = set()
        self._members = {bucket.name: bucket.units for bucket in program.buckets}
        self._bucket_of = {unit: bucket.name for bucket in program.buckets for unit in bucket.units}
        # The buckets whose slices are summed over a second axis of the mesh too.
        self._crossing = crossing_buckets(program.operations())
        self._whole: set[str] = set()
        self._called: set[str] = set()
        self._with_buffer: set[str] = set()
        # Whether buffers are there from an earlier pass of this step.
        self._waits_for_grads = setting.plan.accumulate > 1 and not setting.plan.accumulate_reduced

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
                return partial(self._take_grads, name)
            case Kind.WAIT_REDUCE:
                return partial(self._wait_reduce, name)
            case Kind.REDUCE_SLICE:
                return partial(self._reduce_slice, name)
            case Kind.WAIT_SLICE:
                return partial(self._deliver, name)
            case Kind.TO_OWNERS:
                return partial(self._to_owners, name, operation.num_bytes)
            case Kind.FROM_OWNERS:
                return partial(self._from_owners, name, operation.num_bytes)
            case Kind.UPDATE:
                return self._update
            case Kind.WAIT_GATHER | Kind.BACKWARD | Kind.REDUCE | Kind.REDUCE_FLAGS | Kind.BROADCAST:
                # In place, in buffers that are there.
                return do_nothing
            case _:
                assert_never(kind)

    def skipped(self, operation: Operation, row: Row) -> Action | None:
        """A rank takes part in the gathers of what it does not call, and frees what it does not need."""
        if operation.kind is Kind.GATHER:
            return partial(self._gather, operation.subject)
        if operation.kind is Kind.FREE:
            return partial(self._free_unused, operation.subject)
        return None

    def is_ready(self, unit: str) -> bool:
        return unit in self.ready

    def at_rest(self) -> Mapping[str, int]:
        """Buffers that stay from step to step, gradients of earlier passes, and a flag for each parameter: was it used?
        (engine/core/used.py)
        """
        setting, plan = self.setting, self.setting.plan
        found = {"grads": 0, "reduce": 0, "other": 4 * setting.num_params}
        for unit, states in setting.states.items():
            kept = setting.rules.keeps_reduce_buffers and setting.placements[unit].grads is not SHARDED
            if self._waits_for_grads:
                found["reduce"] += setting.weight(unit) * states.reduce
            elif plan.accumulate > 1 or kept:
                found["grads"] += setting.weight(unit) * (states.reduce if kept else states.grads)
        return found

    def buffers_at_rest(self) -> list[int]:
        found = self.at_rest()
        return [found["grads"], found["reduce"]]

    # Parameters

    def _gather(self, unit: str) -> None:
        if self.setting.placements[unit].params is SHARDED and unit not in self._whole:
            self._whole.add(unit)
            self._change("gathered", self.setting.states[unit].full)
            self._change("gathered", self._kept_of_others(unit), is_left_out=True)

    def _free(self, unit: str) -> None:
        if unit in self._whole:
            self._whole.remove(unit)
            self._change("gathered", -self.setting.states[unit].full)
            self._change("gathered", -self._kept_of_others(unit), is_left_out=True)

    def _free_unused(self, unit: str) -> None:
        if unit not in self._called:
            self._free(unit)

    def _kept_of_others(self, unit: str) -> int:
        """What units that are left out keep gathered between forward and backward."""
        kept = not self.setting.placements[unit].reshard_after_forward
        return self.setting.left_out(unit) * self.setting.states[unit].full if kept else 0

    # Gradients

    def _take_grads(self, unit: str) -> None:
        """The bucket's buffer comes with the first unit that has gradients for it."""
        bucket = self._bucket_of[unit]
        if not self._is_kept(bucket) and not self._waits_for_grads:
            if bucket not in self._with_buffer:
                self._with_buffer.add(bucket)
                self._change("reduce", self._reduce_bytes(bucket))
            if not self._is_sharded(bucket):
                more = self.setting.left_out(unit) * self.setting.states[unit].reduce
                self._change("reduce", more, is_left_out=True)
        self.changes.append(TakeGrads(unit=unit))

    def _wait_reduce(self, bucket: str) -> None:
        self._with_buffer.discard(bucket)
        if bucket not in self._crossing:
            self._deliver(bucket)

    def _reduce_slice(self, bucket: str) -> None:
        self._change("reduce", self._slice_bytes(bucket))
        self._let_buffer_go(bucket)

    def _deliver(self, bucket: str) -> None:
        """Give each owner its gradients."""
        states, plan = self.setting.states, self.setting.plan
        units = self._members[bucket]
        new = sum(states[unit].grads for unit in units)
        more = sum(self.setting.left_out(unit) * states[unit].grads for unit in units)
        if self._is_sharded(bucket):
            self._deliver_slices(bucket, new=new)
            self._change("grads", more, is_left_out=True)
        else:
            self._deliver_whole(bucket, new=new, more=more)
        if plan.accumulate > 1 and plan.accumulate_reduced:
            # Added to what is there, and let go.
            self._change("grads", -new)
            self._change("grads", -more, is_left_out=True)

    def _deliver_slices(self, bucket: str, *, new: int) -> None:
        crossed = self._slice_bytes(bucket)
        if bucket not in self._crossing:
            self._change("grads", new)
            self._let_buffer_go(bucket)
        elif crossed == new:
            # In the dtype of the gradients, which it becomes.
            self.changes.append(Recategorize(before="reduce", after="grads", num_bytes=crossed))
        else:
            self._change("grads", new)
            self._change("reduce", -crossed)

    def _deliver_whole(self, bucket: str, *, new: int, more: int) -> None:
        buffer, more_reduce = self._reduce_bytes(bucket), self._more_reduce(bucket)
        if self.setting.plan.reduce_dtype != "fp32":
            self._change("grads", new)
            self._change("grads", more, is_left_out=True)
            if not self._is_kept(bucket):
                self._change("reduce", -buffer)
                self._change("reduce", -more_reduce, is_left_out=True)
        elif not self._is_kept(bucket):
            # The buffer itself becomes the gradients.
            self.changes.append(Recategorize(before="reduce", after="grads", num_bytes=buffer))
            self._change("reduce", -more_reduce, is_left_out=True)
            self._change("grads", more_reduce, is_left_out=True)

    def _let_buffer_go(self, bucket: str) -> None:
        """Of sharded gradients, of which the slice has been copied."""
        self._change("reduce", -self._reduce_bytes(bucket))
        if self._waits_for_grads:
            self._change("reduce", -self._more_reduce(bucket), is_left_out=True)

    def _is_sharded(self, bucket: str) -> bool:
        return self.setting.placements[self._members[bucket][0]].grads is SHARDED

    def _is_kept(self, bucket: str) -> bool:
        """Whether the buffer stays from step to step."""
        return self.setting.rules.keeps_reduce_buffers and not self._is_sharded(bucket)

    def _reduce_bytes(self, bucket: str) -> int:
        return sum(self.setting.states[unit].reduce for unit in self._members[bucket])

    def _slice_bytes(self, bucket: str) -> int:
        return sum(self.setting.states[unit].reduce_slice for unit in self._members[bucket])

    def _more_reduce(self, bucket: str) -> int:
        """Of the units that are left out."""
        states = self.setting.states
        return sum(self.setting.left_out(unit) * states[unit].reduce for unit in self._members[bucket])

    # The update, and what all do

    def _to_owners(self, unit: str, num_bytes: int) -> None:
        """Slices of values and gradients are sent; what is received of all ranks is put together, and goes."""
        owned, sent = 2 * self.setting.owned.get(unit, 0), num_bytes // self.setting.num_slices
        received = owned // self.setting.weight(unit)
        self._change("other", received)
        self._for_a_while(sent)
        self._own(unit, owned)
        self._change("other", -received)

    def _from_owners(self, unit: str, num_bytes: int) -> None:
        """New values are sent, and received in slices; what was whole goes."""
        owned = self.setting.owned.get(unit, 0)
        self._for_a_while(owned // self.setting.weight(unit) + num_bytes // self.setting.num_slices)
        self._own(unit, -2 * owned)

    def _own(self, unit: str, num_bytes: int) -> None:
        one = num_bytes // self.setting.weight(unit)
        self._change("other", one)
        self._change("other", num_bytes - one, is_left_out=True)

    def _for_a_while(self, num_bytes: int) -> None:
        self._change("other", num_bytes)
        self._change("other", -num_bytes)

    def _update(self) -> None:
        self.changes += update_changes(self.setting.update_bytes)

    def _change(self, category: str, num_bytes: int, *, is_left_out: bool = False) -> None:
        if num_bytes:
            self.changes.append(Change(category, num_bytes, is_left_out=is_left_out))
