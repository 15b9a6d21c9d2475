"""Copies of the tensors that a captured step writes, so that a replay whose guards fail can be undone."""

from collections.abc import Iterable

import torch
from torch import Tensor


class WrittenTensors:
    """Tensors that a step writes besides parameters, gradients and optimizer state, and copies of them."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._copies = [torch.empty_like(tensor) for tensor in self._tensors]

    @torch.no_grad()
    def note(self) -> None:
        """Copy the tensors before the step."""
        if self._tensors:
            torch._foreach_copy_(self._copies, self._tensors)

    @torch.no_grad()
    def undo(self) -> None:
        """Write the copies back."""
        if self._tensors:
            torch._foreach_copy_(self._tensors, self._copies)
