"""The memory of torch's DistributedDataParallel, operation by operation: only kept gradients change.

Parameters and gradient buckets exist all the time. A gradient is copied into its bucket as soon as autograd has made
it, and freed (gradient_as_bucket_view). Passes that do not reduce (no_sync) keep their gradients outside the buckets:
zero_grad has set them to None, so that autograd makes new ones.
"""

from collections.abc import Mapping
from functools import partial
from typing import assert_never

from shardwise.planner.memory.executors.setting import MemoryExecutor
from shardwise.planner.trace_order import do_nothing
from shardwise.program import Kind, Operation, Row
from shardwise.program.compiled_program import Action


class DdpMemory(MemoryExecutor):
    """The gradients of earlier passes."""

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
                | Kind.GATHER_SCALES
                | Kind.TO_OWNERS
                | Kind.FROM_OWNERS
            ):
                raise ValueError(f"DistributedDataParallel does not {operation}")
            case _:
                assert_never(kind)

    def at_rest(self) -> Mapping[str, int]:
        states = self.setting.states
        return {"grads": sum(self.setting.weight(unit) * (states[unit].grads + self._kept(unit)) for unit in states)}

    def buffers_at_rest(self) -> list[int]:
        """Return the buckets, filled from the last gradient on, and the kept gradients one by one."""
        sizes = [size for states in self.setting.states.values() for size in states.gradients]
        buckets = [0]
        for size in reversed(sizes):
            if buckets[-1] >= self.setting.plan.bucket_bytes:
                buckets.append(0)
            buckets[-1] += size
        return buckets + (sizes if self.setting.plan.accumulate > 1 else [])

    def _kept(self, unit: str) -> int:
        """Return the bytes of gradients of earlier passes."""
        return sum(self.setting.states[unit].gradients) if self.setting.plan.accumulate > 1 else 0

    def _take_grads(self, unit: str) -> None:
        self._change("grads", *self.setting.with_others(-self._kept(unit), unit))
