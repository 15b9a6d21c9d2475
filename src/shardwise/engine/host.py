"""Host memory that a device's copies can run beside its computation with."""

import torch
from torch import Tensor


class HostCopies:
    """Copies from the device to pinned host memory, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # Held until the copies are done: the allocator would hand them out while they are read.
        self._sources: list[Tensor] = []

    def zeros(self, size: int, *, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=self._stream is not None)

    def fetch(self, source: Tensor) -> Tensor:
        """Start to copy a tensor of the device; what is returned may be read after `land`."""
        if self._stream is None:
            return source.clone()
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._sources.append(source)
        return target

    def land(self) -> None:
        """Wait until all that was fetched is there."""
        if self._stream is not None and self._sources:
            self._stream.synchronize()
            self._sources.clear()
