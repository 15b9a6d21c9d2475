"""Host memory for a copy of the state, so that training may continue while it is written."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Copies are fastest at whole cache lines.
_ALIGNMENT = 64


class Staging:
    """One buffer, kept from save to save: allocating a new one takes longer than copying into it."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies on the CPU, complete when this returns and valid until the next call."""
        gpus = {tensor.device for tensor in tensors if tensor.is_cuda}
        begins = [0]
        for tensor in tensors:
            begins.append(begins[-1] - (-tensor.numel() * tensor.element_size() // _ALIGNMENT * _ALIGNMENT))
        if self._buffer.numel() < begins[-1]:
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = torch.empty(begins[-1], dtype=torch.uint8, pin_memory=bool(gpus))
        copies = []
        for tensor, begin in zip(tensors, begins, strict=False):
            raw = self._buffer[begin : begin + tensor.numel() * tensor.element_size()]
            copies.append(raw.view(tensor.dtype).view(tensor.shape))
        for target, source in zip(copies, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        for gpu in gpus:
            torch.cuda.current_stream(gpu).synchronize()
        return copies
