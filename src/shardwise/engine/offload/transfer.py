"""Copies between a device's memory and the host's that run while the device computes.

Without a GPU a copy is a clone, made at once, so that all other code is the same and can be tested anywhere.
"""

from typing import Any, Protocol

import torch
from torch import Tensor


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

    def send(self, source: Tensor) -> tuple[Tensor, Any]:
        # torch's cache of pinned memory reuses a block only after the copies that use it.
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
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


class HostCopies:
    """Tensors that are copied from the device to the host and read there."""

    def __init__(self, device: torch.device) -> None:
        self.pinned = device.type == "cuda"
        self._lane = lane_of(device)
        # Sources are held until the copies are done: the allocator would reuse their memory.
        self._in_flight: list[tuple[Tensor, Any]] = []

    def zeros(self, size: int, *, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=self.pinned)

    def fetch(self, source: Tensor) -> Tensor:
        """Start to copy a tensor of the device; the copy that is returned may be read after `land`."""
        target, event = self._lane.send(source)
        self._in_flight.append((source, event))
        return target

    def land(self) -> None:
        """Wait for all copies that were started by `fetch`."""
        for _, event in self._in_flight:
            if isinstance(event, torch.cuda.Event):
                event.synchronize()
        self._in_flight.clear()
