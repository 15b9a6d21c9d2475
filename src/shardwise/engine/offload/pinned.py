"""Host memory that a GPU copies to and from by itself, in exactly the size that is asked for.

torch rounds pinned blocks up to powers of two, and takes half a second for each GiB. Ordinary memory that is registered
with CUDA afterwards is as fast, and is there ten times as soon.
"""

import mmap
import weakref
from collections.abc import Callable

import torch
from torch import Tensor


class _Registered(mmap.mmap):
    """Anonymous memory, registered with CUDA until nothing refers to it any more."""

    address: int = 0

    def __del__(self) -> None:
        if self.address:
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]


def pinned_zeros(num_bytes: int) -> Tensor:
    """Return zeros in pinned memory, as bytes."""
    memory = _Registered(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(memory, dtype=torch.uint8)
    # Many threads touch the pages here; registration would, one after the other.
    found.zero_()
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(cudart.cudaHostRegister(found.data_ptr(), num_bytes, 0)))
    memory.address = found.data_ptr()
    return found


# A free block is used for less than it holds, down to this part of it.
_LEAST_PART = 0.8


class PinnedPool:
    """Pinned memory for copies that all happen in one order: a block may be written again once nobody refers to it."""

    def __init__(self, make: Callable[[int], Tensor] = pinned_zeros) -> None:
        self._make = make
        self._free: list[Tensor] = []
        self.num_bytes = 0

    def empty_like(self, source: Tensor) -> Tensor:
        """Return memory of the form of `source`, which comes back to the pool when the tensor is no longer used."""
        size = source.nbytes
        fitting = [block for block in self._free if _LEAST_PART * block.numel() <= size <= block.numel()]
        if fitting:
            block = min(fitting, key=Tensor.numel)
            self._free = [other for other in self._free if other is not block]
        else:
            self._trim()
            block = self._make(size)
            self.num_bytes += size
        found = block[:size].view(source.dtype).view(source.shape)
        weakref.finalize(found, self._free_again, block).atexit = False
        return found

    def _free_again(self, block: Tensor) -> None:
        self._free.append(block)

    def _trim(self) -> None:
        """Give up what is free where that is most of it: sizes have changed."""
        if 2 * sum(block.numel() for block in self._free) > self.num_bytes:
            self.num_bytes -= sum(block.numel() for block in self._free)
            self._free = []
