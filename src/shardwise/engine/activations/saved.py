"""Tensors that are saved for backward: on the device (Kept), or elsewhere (offload.py)."""

from torch import Tensor

from shardwise.base.torch_internals.torch_private import ADInplaceOrView, ExcludeDispatchKey


class SavedTensor:
    """A tensor that is saved for backward."""

    __slots__ = ()

    @property
    def intact(self) -> bool:
        """Return whether the tensor was not modified since it was saved."""
        raise NotImplementedError

    def tensor(self) -> Tensor:
        """Return the tensor, or another with the same values."""
        raise NotImplementedError


class Kept(SavedTensor):
    """A tensor that stays where it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = detach(tensor)
        self._version = tensor._version

    @property
    def intact(self) -> bool:
        return self._tensor._version == self._version

    def tensor(self) -> Tensor:
        # Not the tensor itself: autograd would set its grad_fn, which keeps a graph alive.
        return detach(self._tensor)


def detach(tensor: Tensor) -> Tensor:
    """Detach a tensor so that both share one version counter, even if this is called below autograd."""
    with ExcludeDispatchKey(ADInplaceOrView, False):
        return tensor.detach()
