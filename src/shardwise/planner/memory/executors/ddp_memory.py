"""The memory of torch's DistributedDataParallel, operation by operation: only kept gradients change.

Parameters and gradient buckets exist all the time. A gradient is copied into its bucket as soon as autograd has made
it, and freed (gradient_as_bucket_view). Passes that do not reduce (no_sync) keep their gradients outside the buckets:
zero_grad has set them to None, so that autograd makes new ones.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import assert_never

from shardwise.planner.fold import do_nothing
from shardwise.planner.memory.events import MemoryExecutor
from shardwise.program import Kind, Operation, Row
from shardwise.program.run import Action


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
                | Kind.GATHER_SLICE
                | Kind.WAIT_GATHER_SLICE
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


class PlainMemory(DdpMemory):
    """An ordinary loop on one device, without a wrapper: gradients exist from backward to the update, in no bucket."""

    def action(self, operation: Operation, row: Row) -> Action:
        if operation.kind is Kind.TAKE_GRADS and not self._is_kept:
            return partial(self._change_grads, (operation.subject,), sign=1)
        return super().action(operation, row)

    def at_rest(self) -> Mapping[str, int]:
        states = self.setting.states
        kept = (self.setting.weight(unit) * states[unit].grads for unit in states)
        return {"grads": sum(kept) if self._is_kept else 0}

    def buffers_at_rest(self) -> list[int]:
        return [size for states in self.setting.states.values() for size in states.gradients if self._is_kept]

    @property
    def _is_kept(self) -> bool:
        """Return whether the gradients of earlier passes are there all the time, and autograd adds to them."""
        return self.setting.plan.accumulate > 1

    def _update(self) -> None:
        super()._update()
        if not self._is_kept:
            self._change_grads(self.setting.states, sign=-1)

    def _change_grads(self, units: Iterable[str], *, sign: int) -> None:
        for unit in units:
            states = self.setting.states[unit]
            num_bytes, others = self.setting.with_others(sign * states.grads, unit)
            self._change("grads", num_bytes, others, pieces=states.gradients if sign > 0 else ())
