"""What torch's `fully_shard` allocates and frees for each operation of a step.

A gather fills one flat buffer, which is then copied out, parameter by parameter. In forward the flat buffer stays until
the next unit's has come; in backward it goes at once. Gradients are copied into one buffer in the reduce dtype, which
stays until the next unit's are there. Between the passes of a step they are kept whole, each by itself, in the reduce
dtype; if every pass reduces, as slices. One rank gathers nothing.
"""

from collections.abc import Mapping
from functools import partial
from typing import assert_never

from shardwise.planner.memory.executors.setting import MemorySetting, update_changes
from shardwise.planner.memory.replay import Change, MemoryChange, TakeGrads
from shardwise.planner.trace_order import do_nothing
from shardwise.program import Kind, Operation, Row, StepProgram, Trigger
from shardwise.program.compiled_program import Action
from shardwise.spec import ROOT

# Streams with memory of their own.
_GATHER, _REDUCE = "gather", "reduce"


class FullyShardMemory:
    """Which units are whole, and which flat buffers are there."""

    def __init__(self, program: StepProgram, setting: MemorySetting) -> None:
        self.setting = setting
        self.changes: list[MemoryChange] = []
        self.ready: set[str] = set()
        self._members = {bucket.name: bucket.units for bucket in program.buckets}
        plan = setting.plan
        self._keeps_whole = plan.accumulate > 1 and not plan.accumulate_reduced
        self._keeps_slices = plan.accumulate > 1 and plan.accumulate_reduced
        self._filled: set[str] = set()
        self._whole: set[str] = set()
        # The unit whose flat buffer forward has left.
        self._left: str | None = None

    def action(self, operation: Operation, row: Row) -> Action:
        name, kind = operation.subject, operation.kind
        match kind:
            case Kind.GATHER:
                return partial(self._fill_flat, name)
            case Kind.WAIT_GATHER:
                return self._wait_gather(name, row.trigger)
            case Kind.FREE:
                return partial(self._free, name)
            case Kind.TAKE_GRADS:
                return partial(self._take_grads, name)
            case Kind.REDUCE:
                return partial(self._reduce, name)
            case Kind.WAIT_REDUCE:
                return partial(self._wait_reduce, name)
            case Kind.UPDATE:
                return self._update
            case (
                Kind.FORWARD | Kind.BACKWARD | Kind.REDUCE_SLICE | Kind.WAIT_SLICE | Kind.REDUCE_FLAGS | Kind.BROADCAST
            ):
                # A slice is summed in place, where it is the gradient.
                return do_nothing
            case Kind.TO_OWNERS | Kind.FROM_OWNERS:
                # Which its rules do not have.
                return do_nothing
            case _:
                assert_never(kind)

    def skipped(self, operation: Operation, row: Row) -> Action | None:
        """A unit that is not called is not gathered."""
        return None

    def is_ready(self, unit: str) -> bool:
        return unit in self.ready

    def at_rest(self) -> Mapping[str, int]:
        setting = self.setting
        return {"grads": sum(setting.weight(unit) * self._kept_grads(unit) for unit in setting.states)}

    def buffers_at_rest(self) -> list[int]:
        states = self.setting.states
        if self._keeps_whole:
            return [size for unit in states for size in states[unit].gradients]
        return [states[unit].grads for unit in states] if self._keeps_slices else []

    def _kept_grads(self, unit: str) -> int:
        """Gradients of earlier passes."""
        states = self.setting.states[unit]
        return sum(states.gradients) if self._keeps_whole else states.grads if self._keeps_slices else 0

    # Parameters

    def _fill_flat(self, unit: str) -> None:
        if unit in self._filled or unit in self._whole:
            return
        self._filled.add(unit)
        states = self.setting.states[unit]
        self._change(states.copy_in, stream=_GATHER)
        self._change(states.flat, stream=_GATHER)
        self._change(-states.copy_in)

    def _wait_gather(self, unit: str, trigger: Trigger) -> Action:
        """Copy the parameters out; in forward the flat buffer takes the place of that of the unit before."""
        if trigger is Trigger.BEFORE_FORWARD:
            return partial(self._arrive_in_forward, unit)
        if trigger is Trigger.AFTER_FORWARD:
            return self._drop_left
        return partial(self._arrive_in_backward, unit)

    def _arrive_in_forward(self, unit: str) -> None:
        self._fill_flat(unit)
        self._drop_left()
        self._copy_out(unit)
        self._change(self._kept_of_others(unit), is_left_out=True)
        self._left = unit

    def _arrive_in_backward(self, unit: str) -> None:
        self._fill_flat(unit)
        self._copy_out(unit)
        self._change(-self.setting.states[unit].flat)

    def _copy_out(self, unit: str) -> None:
        self._filled.discard(unit)
        self._whole.add(unit)
        states = self.setting.states[unit]
        self.changes.append(Change("gathered", states.full, pieces=states.outputs))

    def _drop_left(self) -> None:
        if self._left is not None:
            self._change(-self.setting.states[self._left].flat)
        self._left = None

    def _free(self, unit: str) -> None:
        if unit in self._whole:
            self._whole.remove(unit)
            self._change(-self.setting.states[unit].full)
            self._change(-self._kept_of_others(unit), is_left_out=True)

    def _kept_of_others(self, unit: str) -> int:
        """What units that are left out keep gathered between forward and backward."""
        kept = unit != ROOT and not self.setting.placements[unit].reshard_after_forward
        return self.setting.left_out(unit) * self.setting.states[unit].full if kept else 0

    def _change(self, num_bytes: int, *, stream: str = "", is_left_out: bool = False) -> None:
        if num_bytes:
            self.changes.append(Change("gathered", num_bytes, stream=stream, is_left_out=is_left_out))

    # Gradients

    def _take_grads(self, unit: str) -> None:
        kept, buffer = self._kept_grads(unit), Change("reduce", self.setting.states[unit].reduce)
        if not self._keeps_whole:
            self.changes += (buffer, TakeGrads(unit=unit))
            return
        # Added to those of earlier passes, which go into the buffer.
        self.changes += (TakeGrads(unit=unit), buffer, Change("grads", -kept))
        self.changes.append(Change("grads", -self.setting.left_out(unit) * kept, is_left_out=True))

    def _reduce(self, bucket: str) -> None:
        for unit in self._members[bucket]:
            num_bytes = self.setting.states[unit].grads
            more = self.setting.left_out(unit) * num_bytes
            self.changes.append(Change("grads", num_bytes, stream=_REDUCE))
            if self._keeps_slices:
                # Added to those of earlier passes, and let go.
                self.changes.append(Change("grads", -num_bytes))
            else:
                self.changes.append(Change("grads", more, is_left_out=True))

    def _wait_reduce(self, bucket: str) -> None:
        num_bytes = sum(self.setting.states[unit].reduce for unit in self._members[bucket])
        self.changes.append(Change("reduce", -num_bytes))

    def _update(self) -> None:
        self.changes += update_changes(self.setting.update_bytes)
