"""The lane between a device's memory and the host's: copies that run while the device computes.

Without a GPU a copy is a clone, made at once, so that everything else is the same and can be tried anywhere.
"""

from typing import Any, Protocol

import torch
from torch import Tensor


class Lane(Protocol):
    """Each copy comes with an event; `wait` makes the stream that computes wait for it."""

    def send(self, source: Tensor) -> tuple[Tensor, Any]:
        """A copy in host memory. The source must stay until the event."""
        ...

    def bring(self, sources: list[Tensor]) -> list[tuple[Tensor, Any]]:
        """Copies on the device, which must stay until their events."""
        ...

    def wait(self, event: Any) -> None: ...


def lane_of(device: torch.device) -> Lane:
    return GpuLane(device) if device.type == "cuda" else HostLane()


class GpuLane:
    """One stream for both directions, so that nothing is brought in before it has been sent out."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, source: Tensor) -> tuple[Tensor, Any]:
        # Pinned memory comes from torch's cache, which hands it out again only after the copies that use it.
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host.copy_(source, non_blocking=True)
        return host, self.stream.record_event()

    def bring(self, sources: list[Tensor]) -> list[tuple[Tensor, Any]]:
        copies = [torch.empty(source.shape, dtype=source.dtype, device=self.device) for source in sources]
        # The memory is of the stream that computes, which may still use it for what was there before.
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
