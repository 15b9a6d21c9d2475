"""Host memory from and to which a device can copy while it computes."""

from typing import Any

import torch
from torch import Tensor

from shardwise.engine.offload.transfer import lane_of


class HostCopies:
    """What is copied from the device to the host and read there."""

    def __init__(self, device: torch.device) -> None:
        self.pinned = device.type == "cuda"
        self._lane = lane_of(device)
        # Held until the copies are done: the allocator would hand them out while they are read.
        self._under_way: list[tuple[Tensor, Any]] = []

    def zeros(self, size: int, *, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=self.pinned)

    def fetch(self, source: Tensor) -> Tensor:
        """Start to copy a tensor of the device; what is returned may be read after `land`."""
        target, event = self._lane.send(source)
        self._under_way.append((source, event))
        return target

    def land(self) -> None:
        """Wait until all that was fetched is there."""
        for _, event in self._under_way:
            if isinstance(event, torch.cuda.Event):
                event.synchronize()
        self._under_way.clear()
