"""Tensors that wait for backward: where they are (Kept), or elsewhere (offload.py)."""

import torch
from torch import Tensor


class SavedTensor:
    """A tensor that waits for backward, somewhere."""

    __slots__ = ()

    @property
    def intact(self) -> bool:
        """Whether nobody has written into the tensor since."""
        raise NotImplementedError

    def tensor(self) -> Tensor:
        """The tensor, or another of the same values."""
        raise NotImplementedError


class Kept(SavedTensor):
    """A tensor that waits where it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = detach(tensor)
        self._version = tensor._version

    @property
    def intact(self) -> bool:
        return self._tensor._version == self._version

    def tensor(self) -> Tensor:
        # Not the tensor itself: autograd would write into it which operation it came from, and that keeps a graph.
        return detach(self._tensor)


def detach(tensor: Tensor) -> Tensor:
    """The same values without the graph; versions are counted in common, also where this is called below autograd."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()
