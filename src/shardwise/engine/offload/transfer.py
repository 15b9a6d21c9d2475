"""Copies between a device's memory and the host's that run while the device computes.

Without a GPU a copy is made at once, so that all other code is the same and can be tested anywhere.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.comm.groups.collectives import DONE, Work
from shardwise.engine.offload.pinned import PinnedPool, pinned_zeros
from shardwise.plan import Plan
from shardwise.program.rules.context import MOST_GRADS, overdue


class Lane(Protocol):
    """Each copy comes with an event; `wait` makes the compute stream wait for it."""

    def send(self, source: Tensor) -> tuple[Tensor, Any]:
        """Copy to host memory. The source must be kept until the event."""
        ...

    def bring(self, sources: list[Tensor]) -> list[tuple[Tensor, Any]]:
        """Copy to the device. The copies must be kept until their events."""
        ...

    def wait(self, event: Any) -> None: ...


def lane_of(device: torch.device) -> Lane:
    return GpuLane(device) if device.type == "cuda" else HostLane()


class GpuLane:
    """One stream for both directions, so that nothing is copied in before it was copied out."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = PinnedPool()

    def send(self, source: Tensor) -> tuple[Tensor, Any]:
        host = self._pool.empty_like(source)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(source, non_blocking=True)
        return host, self.stream.record_event()

    def bring(self, sources: list[Tensor]) -> list[tuple[Tensor, Any]]:
        copies = [torch.empty(source.shape, dtype=source.dtype, device=self.device) for source in sources]
        # The compute stream may still use this memory for a tensor that was there before.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        found = []
        with torch.cuda.stream(self.stream):
            for copy, source in zip(copies, sources, strict=True):
                copy.copy_(source, non_blocking=True)
                found.append((copy, self.stream.record_event()))
        return found

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self.device).wait_event(event)


class HostLane:
    def send(self, source: Tensor) -> tuple[Tensor, Any]:
        return source.clone(), True

    def bring(self, sources: list[Tensor]) -> list[tuple[Tensor, Any]]:
        return [(source.clone(), True) for source in sources]

    def wait(self, event: Any) -> None:
        pass


def host_copies(plan: Plan, *, device: torch.device) -> "HostCopies | None":
    """Return the host memory of a plan's states; None if they are all on the device."""
    return HostCopies(device, keeps_grads=plan.offload_update == "device") if plan.offload_states else None


class HostCopies:
    """Host memory for states: what is in it, and the copies to and from it.

    keeps_grads   gradients stay on the device, through which the update passes the states (streamed_update.py)
    """

    def __init__(self, device: torch.device, *, keeps_grads: bool) -> None:
        self.device = device
        self.keeps_grads = keeps_grads
        self._lane = lane_of(device)
        self._loads = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # Sources are held until the copies are done: the allocator would reuse their memory.
        self._in_flight: deque[tuple[Tensor, Any]] = deque()
        self._last: Any = None

    def zeros(self, size: int, *, dtype: torch.dtype) -> Tensor:
        if self._loads is None or not size:
            return torch.zeros(size, dtype=dtype)
        return pinned_zeros(size * dtype.itemsize).view(dtype)

    # Gradients that are read on the host

    def fetch(self, source: Tensor) -> Tensor:
        """Start to copy a tensor of the device; the copy that is returned may be read after `land`.

        A few copies are under way at a time, or the device would hold all gradients.
        """
        target, self._last = self._lane.send(source)
        self._in_flight.append((source, self._last))
        for _, event in overdue(self._in_flight, most=MOST_GRADS):
            self._lane.wait(event)
        return target

    def land(self) -> None:
        """Wait for all copies that were started by `fetch`."""
        self.settle(self._last)
        self._in_flight.clear()

    # Slices that are gathered

    @contextmanager
    def loading(self, *, after: Any) -> Iterator[None]:
        """Copy from host memory in this block while the device computes; after an update's event, unless None."""
        if self._loads is None:
            yield
            return
        # The compute stream may still use the memory that is copied to, for what was there before.
        self._loads.wait_stream(torch.cuda.current_stream(self.device))
        if after is not None:
            self._loads.wait_event(after)
        with torch.cuda.stream(self._loads):
            yield

    def arrival(self, gathering: Work | None, *, then: Callable[[], None]) -> Work:
        """Return what is waited for until everything that was loaded so far is there and gathered; `then` is called."""
        event = None if self._loads is None else self._loads.record_event()
        return _Arrival(self._lane, event, gathering or DONE, then)

    def settle(self, update: Any) -> None:
        """Wait until an update, or a copy, has written host memory."""
        if isinstance(update, torch.cuda.Event):
            update.synchronize()


class _Arrival:
    def __init__(self, lane: Lane, event: Any, gathering: Work, then: Callable[[], None]) -> None:
        self._lane, self._event, self._gathering, self._then = lane, event, gathering, then

    def wait(self) -> None:
        self._gathering.wait()
        if self._event is not None:
            self._lane.wait(self._event)
        self._then()
