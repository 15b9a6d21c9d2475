"""What torch's DistributedDataParallel allocates and frees for each operation of a step: nothing but kept gradients.

Parameters and their gradients' buckets are there all the time. A gradient is copied into its bucket as soon as autograd
has made it, and freed (gradient_as_bucket_view). The passes of a step that do not reduce (no_sync) keep theirs outside
of the buckets: zero_grad has set them to None, so that autograd makes new ones.
"""

from collections.abc import Mapping
from functools import partial
from typing import assert_never

from shardwise.planner.memory.executors.setting import MemorySetting, update_changes
from shardwise.planner.memory.replay import Change, MemoryChange
from shardwise.planner.trace_order import do_nothing
from shardwise.program import Kind, Operation, Row, StepProgram
from shardwise.program.compiled_program import Action


class DdpMemory:
    def __init__(self, program: StepProgram, setting: MemorySetting) -> None:
        self.setting = setting
        self.changes: list[MemoryChange] = []
        self.ready: set[str] = set()

    def action(self, operation: Operation, row: Row) -> Action:
        kind = operation.kind
        match kind:
            case Kind.UPDATE:
                return self._update
            case Kind.TAKE_GRADS:
                return partial(self._take_grads, operation.subject)
            case Kind.FORWARD | Kind.BACKWARD | Kind.BROADCAST | Kind.REDUCE | Kind.WAIT_REDUCE:
                return do_nothing
            case (
                Kind.GATHER
                | Kind.WAIT_GATHER
                | Kind.FREE
                | Kind.REDUCE_SLICE
                | Kind.WAIT_SLICE
                | Kind.REDUCE_FLAGS
                | Kind.TO_OWNERS
                | Kind.FROM_OWNERS
            ):
                raise ValueError(f"DistributedDataParallel does not {operation}")
            case _:
                assert_never(kind)

    def skipped(self, operation: Operation, row: Row) -> Action | None:
        return None

    def is_ready(self, unit: str) -> bool:
        return unit in self.ready

    def at_rest(self) -> Mapping[str, int]:
        setting = self.setting
        return {
            "grads": sum(
                setting.weight(unit) * (states.grads + self._kept_grads(unit))
                for unit, states in setting.states.items()
            )
        }

    def buffers_at_rest(self) -> list[int]:
        """Buckets: gradients, last first, until one is full; and those of earlier passes, one by one."""
        sizes = [size for states in self.setting.states.values() for size in states.gradients]
        buckets = [0]
        for size in reversed(sizes):
            if buckets[-1] >= self.setting.plan.bucket_bytes:
                buckets.append(0)
            buckets[-1] += size
        return buckets + (sizes if self.setting.plan.accumulate > 1 else [])

    def _kept_grads(self, unit: str) -> int:
        """Gradients of earlier passes."""
        return sum(self.setting.states[unit].gradients) if self.setting.plan.accumulate > 1 else 0

    def _take_grads(self, unit: str) -> None:
        kept = self._kept_grads(unit)
        if kept:
            self.changes += (
                Change("grads", -kept),
                Change("grads", -self.setting.left_out(unit) * kept, is_left_out=True),
            )

    def _update(self) -> None:
        self.changes += update_changes(self.setting.update_bytes)
