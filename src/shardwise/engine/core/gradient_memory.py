"""Memory for averaged gradients, from backward to the update."""

from collections.abc import Callable

import torch
from torch import Tensor

Places = Callable[[str, int, torch.dtype], Tensor | None]
"""Returns memory for gradients by name, size and dtype; None where it has none now."""


class GradientMemory:
    """The allocator's memory, or that of `places`."""

    def __init__(self) -> None:
        self.places: Places | None = None

    def lie_in(self, places: Places | None) -> None:
        """Lie in this memory from now on; None: in the allocator's."""
        self.places = places

    def empty(self, name: str, num_elements: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised memory for the gradients of this name."""
        found = self.places(name, num_elements, dtype) if self.places is not None else None
        return torch.empty(num_elements, dtype=dtype, device=device) if found is None else found
