"""Host memory that a GPU copies to and from by itself, in exactly the size that is asked for.

torch rounds pinned blocks up to powers of two, and takes half a second for each GiB. Ordinary memory that is registered
with CUDA afterwards is as fast, and is there ten times as soon.
"""

import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class _Registered(mmap.mmap):
    """Anonymous memory, registered with CUDA until nothing refers to it any more."""

    address: int = 0

    def __del__(self) -> None:
        if self.address:
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]


_registered: weakref.WeakSet[_Registered] = weakref.WeakSet()


def pinned_bytes() -> int:
    """Return the pinned memory of this process that is in use, or kept for the next copies."""
    return sum(map(len, _registered))


def _pinned(num_bytes: int) -> _Registered:
    memory = _Registered(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(memory, dtype=torch.uint8)
    # Many threads touch the pages here; registration would, one after the other.
    found.zero_()
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(cudart.cudaHostRegister(found.data_ptr(), num_bytes, 0)))
    memory.address = found.data_ptr()
    _registered.add(memory)
    return memory


def pinned_zeros(num_bytes: int) -> Tensor:
    """Return zeros in pinned memory, as bytes."""
    return torch.frombuffer(_pinned(num_bytes), dtype=torch.uint8)


class PinnedPool:
    """Pinned memory for copies that all happen in one order: a block may be written again once no tensor uses it."""

    def __init__(self, make: Callable[[int], Any] = _pinned) -> None:
        self._make = make
        # By size: a block, and the storage that lies in it or lay there last.
        self._blocks: defaultdict[int, list[tuple[Any, StorageWeakRef]]] = defaultdict(list)

    @property
    def num_bytes(self) -> int:
        return sum(size * len(blocks) for size, blocks in self._blocks.items())

    def empty_like(self, source: Tensor) -> Tensor:
        """Return memory of the form of `source`, which is free again when no tensor uses it."""
        blocks = self._blocks[source.nbytes]
        free = next((place for place, (_, user) in enumerate(blocks) if _is_over(user)), None)
        if free is None:
            self._drop_other_sizes(source.nbytes)
        memory = self._make(source.nbytes) if free is None else blocks.pop(free)[0]
        found = torch.frombuffer(memory, dtype=source.dtype).view(source.shape)
        blocks.append((memory, StorageWeakRef(found.untyped_storage())))  # type: ignore[no-untyped-call]
        return found

    def _drop_other_sizes(self, size: int) -> None:
        """Give up free blocks of other sizes before more memory is taken: shapes have changed."""
        for other, blocks in self._blocks.items():
            if other != size and all(_is_over(user) for _, user in blocks):
                blocks.clear()


def _is_over(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]
