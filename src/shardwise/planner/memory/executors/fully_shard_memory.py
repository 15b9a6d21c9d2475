"""The memory of torch's `fully_shard`, operation by operation.

A gather fills one flat buffer, which is then copied out, parameter by parameter. In forward the flat buffer stays until
the next unit's has been copied out; in backward it is freed immediately. Gradients are copied into one buffer in the
reduce dtype, which stays until the next unit's are complete. Between the passes of a step unsharded gradients are kept,
each by itself, in the reduce dtype; if every pass reduces, slices are kept. One rank gathers nothing.

Local variables of torch's functions hold two buffers longer than the schedule needs (torch 2.11 to 2.13,
torch/distributed/fsdp/_fully_shard): wait_for_unshard the flat buffer of the previous unit, during the copy, and
foreach_reduce the gradient of the unit's last parameter, until the reduce has been issued. Where an embedding or a head
is a unit, either buffer is as large as that unit.
"""

from collections.abc import Mapping
from functools import partial
from typing import assert_never

from shardwise.planner.fold import do_nothing
from shardwise.planner.memory.events import MemoryExecutor, MemorySetting
from shardwise.planner.memory.replay import TakeGrads
from shardwise.program import Kind, Operation, Row, StepProgram, Trigger
from shardwise.program.run import Action

# Streams with their own memory.
_GATHER, _REDUCE = "gather", "reduce"


class FullyShardMemory(MemoryExecutor):
    """The gathered units and the flat buffers."""

    def __init__(self, program: StepProgram, setting: MemorySetting) -> None:
        super().__init__(program, setting)
        accumulates = setting.plan.accumulate > 1
        self._keeps_unsharded = accumulates and not setting.plan.accumulate_reduced
        self._keeps_slices = accumulates and setting.plan.accumulate_reduced
        self._filled: set[str] = set()
        # The unit whose flat buffer remains in forward.
        self._last: str | None = None

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
                Kind.FORWARD
                | Kind.BACKWARD
                | Kind.REDUCE_SLICE
                | Kind.WAIT_SLICE
                | Kind.GATHER_SLICE
                | Kind.WAIT_GATHER_SLICE
                | Kind.REDUCE_FLAGS
                | Kind.BROADCAST
                | Kind.GATHER_SCALES
            ):
                # A slice, which is the gradient, is summed in place.
                return do_nothing
            case Kind.TO_OWNERS | Kind.FROM_OWNERS:
                # Not in its rules.
                return do_nothing
            case _:
                assert_never(kind)

    def at_rest(self) -> Mapping[str, int]:
        return {"grads": sum(self.setting.weight(unit) * self._kept(unit) for unit in self.setting.states)}

    def buffers_at_rest(self) -> list[int]:
        states = self.setting.states.values()
        if self._keeps_unsharded:
            return [size for one in states for size in one.gradients]
        return [one.grads for one in states] if self._keeps_slices else []

    def _kept(self, unit: str) -> int:
        """Return the bytes of gradients of earlier passes."""
        states = self.setting.states[unit]
        return sum(states.gradients) if self._keeps_unsharded else states.grads if self._keeps_slices else 0

    # Parameters

    def _fill_flat(self, unit: str) -> None:
        if unit in self._filled or unit in self._gathered:
            return
        self._filled.add(unit)
        states = self.setting.states[unit]
        self._change("gathered", states.copy_in, stream=_GATHER)
        self._change("gathered", states.flat, stream=_GATHER)
        self._change("gathered", -states.copy_in, stream=_GATHER)

    def _wait_gather(self, unit: str, trigger: Trigger) -> Action:
        """Copy the parameters out; in forward the flat buffer replaces that of the previous unit."""
        if trigger is Trigger.BEFORE_FORWARD:
            return partial(self._arrive_in_forward, unit)
        if trigger is Trigger.AFTER_FORWARD:
            return self._drop_last
        return partial(self._arrive_in_backward, unit)

    def _arrive_in_forward(self, unit: str) -> None:
        self._fill_flat(unit)
        self._copy_out(unit, others=self._gathered_bytes(unit)[1])
        self._drop_last()
        self._last = unit

    def _arrive_in_backward(self, unit: str) -> None:
        self._fill_flat(unit)
        self._copy_out(unit)
        self._change("gathered", -self.setting.states[unit].flat, stream=_GATHER)

    def _copy_out(self, unit: str, *, others: int = 0) -> None:
        self._filled.discard(unit)
        self._gathered.add(unit)
        states = self.setting.states[unit]
        self._change("gathered", states.full, others, pieces=states.outputs)

    def _drop_last(self) -> None:
        if self._last is not None:
            self._change("gathered", -self.setting.states[self._last].flat, stream=_GATHER)
        self._last = None

    # Gradients

    def _take_grads(self, unit: str) -> None:
        states = self.setting.states[unit]
        if self._keeps_unsharded:
            # Added to those of earlier passes, which are copied into the buffer.
            self.changes.append(TakeGrads(unit=unit))
            self._change("reduce", states.reduce)
            self._release_kept(unit, self._kept(unit) - self._last_kept(unit))
        else:
            self._change("reduce", states.reduce)
            self.changes.append(TakeGrads(unit=unit, kept=states.last_grad))

    def _reduce(self, bucket: str) -> None:
        for unit in self._members[bucket]:
            grads, others = self._bytes("grads", (unit,))
            self._change("grads", grads, 0 if self._keeps_slices else others, stream=_REDUCE)
            if self._keeps_slices:
                # Added to those of earlier passes, and freed.
                self._change("grads", -grads, stream=_REDUCE)
            if self._keeps_unsharded:
                self._release_kept(unit, self._last_kept(unit))
            elif self.setting.states[unit].last_grad:
                self.changes.append(TakeGrads(unit=unit))

    def _release_kept(self, unit: str, num_bytes: int) -> None:
        """Release gradients of earlier passes."""
        self._change("grads", *self.setting.with_others(-num_bytes, unit))

    def _last_kept(self, unit: str) -> int:
        """Return the bytes that earlier passes have kept of the last parameter's gradient, if it outlives the copy."""
        states = self.setting.states[unit]
        return states.gradients[-1] if states.last_grad else 0

    def _wait_reduce(self, bucket: str) -> None:
        self._change("reduce", -self._bytes("reduce", self._members[bucket])[0])
