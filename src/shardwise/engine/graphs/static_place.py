"""A tensor at a fixed address of the graphs' memory, which may be lent to code outside of the graphs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.base.torch_internals import torch_private


class StaticPlace:
    """A tensor that graphs read or write; it does not keep its memory in use.

    owner     keeps the memory in use while graphs are recorded that must not get it
    source    the tensor whose content was copied here in pass number `pass_number`; None if a call wrote here
    """

    __slots__ = (
        "__weakref__",
        "_num_own_uses",
        "_storage",
        "owner",
        "pass_number",
        "pointer",
        "source",
        "tensor",
        "version",
    )

    def __init__(self, alias: Tensor, *, owner: Tensor | None) -> None:
        self.tensor = alias
        self.owner = owner
        self.pointer = alias.data_ptr()
        self.source: Tensor | None = None
        self.version = self.pass_number = -1
        self._storage = alias.untyped_storage()
        self._num_own_uses = self._num_uses()

    def lend(self) -> Tensor:
        """Return the tensor for code outside of the graphs, which `is_lent` notices.

        In inference mode an inference tensor, as the operations of an ordinary call would return.
        """
        if torch.is_inference_mode_enabled():
            return at(self.tensor, self.tensor.untyped_storage())
        return self.tensor.detach()

    @property
    def is_lent(self) -> bool:
        return self._num_uses() > self._num_own_uses

    def _num_uses(self) -> int:
        return int(torch_private.storage_use_count(self._storage._cdata))

    def fits(self, tensor: Tensor) -> bool:
        """Return whether this is the place at which a tensor is, in the same form."""
        mine = self.tensor
        return (
            self.pointer == tensor.data_ptr()
            and mine.shape == tensor.shape
            and mine.stride() == tensor.stride()
            and mine.dtype == tensor.dtype
        )

    def can_load(self, tensor: Tensor, *, pass_number: int) -> bool:
        """Return whether the content of `tensor` is here, or may be copied here, in this pass."""
        return tensor.data_ptr() == self.pointer or self.pass_number != pass_number or self.holds(tensor)

    def load(self, tensor: Tensor, *, pass_number: int) -> None:
        """Copy a tensor here, unless it is here already: masks and tables are given to every unit of a pass."""
        if tensor.data_ptr() == self.pointer or (self.pass_number == pass_number and self.holds(tensor)):
            return
        _copy(self.tensor, tensor)
        # Held, so that no other tensor can have its identity in this pass.
        self.source, self.version, self.pass_number = tensor, tensor._version, pass_number

    def holds(self, tensor: Tensor) -> bool:
        """Return whether this tensor, unchanged, was the last that was copied here."""
        return self.source is tensor and self.version == tensor._version

    def filled(self, *, pass_number: int) -> None:
        """Note that a call has written here."""
        self.source, self.pass_number = None, pass_number


def at(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Return a tensor of the same form in other memory."""
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _compact(tensor: Tensor) -> Tensor:
    """Return the part of an expanded tensor that has all of its elements."""
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _copy(target: Tensor, source: Tensor) -> None:
    with torch.no_grad():
        _compact(target).copy_(_compact(source), non_blocking=True)


def empty_like(tensor: Tensor) -> Tensor:
    """Return uninitialised memory in the form of a tensor, strides included."""
    compact = _compact(tensor)
    made = uninitialised(compact.shape, compact.stride(), dtype=tensor.dtype, device=tensor.device)
    return made if compact is tensor else made.expand(tensor.shape)


def uninitialised(shape: Sequence[int], strides: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory that nothing writes to.

    Under deterministic algorithms torch fills new memory with NaN, which a graph would do at each replay, and which
    outside of a graph might come after the first use, on another stream.
    """
    options: Any = torch.utils.deterministic
    fills, options.fill_uninitialized_memory = options.fill_uninitialized_memory, False
    try:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    finally:
        options.fill_uninitialized_memory = fills
