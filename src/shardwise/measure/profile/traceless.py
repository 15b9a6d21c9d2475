"""Collectives for recording memory on a CPU, without Gloo's own use of memory.

Gloo gathers through its own buffer, and its threads may release a tensor last, a moment after the wait, where the
profiler does not see it: now and then both would stay live in a ledger. So here

    a gather     is a broadcast of each rank's slice, in place: the same bytes, without a buffer
    a tensor     is only lent: the backend gets a view of its memory, and only the engine frees it

On a GPU, memory of the backend is not in a ledger either.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.groups.collectives import Collectives, Work
from shardwise.comm.groups.groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class TracelessCollectives:
    """The `inner` collectives, invisible to a recording."""

    inner: Collectives

    def all_gather(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        slices = lent(buffer).view(group.size, -1)
        return _All([self.inner.broadcast(part, source=rank, group=group) for rank, part in enumerate(slices)])

    def reduce_scatter(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        return self.inner.reduce_scatter(lent(buffer), group=group)

    def all_reduce(self, buffer: Tensor, *, group: Group) -> Work:
        return self.inner.all_reduce(lent(buffer), group=group)

    def broadcast(self, buffer: Tensor, *, source: int, group: Group) -> Work:
        return self.inner.broadcast(lent(buffer), source=source, group=group)

    def all_to_all(
        self, received: Tensor, sent: Tensor, *, received_sizes: Sequence[int], sent_sizes: Sequence[int], group: Group
    ) -> Work:
        return self.inner.all_to_all(
            lent(received), lent(sent), received_sizes=received_sizes, sent_sizes=sent_sizes, group=group
        )


@contextmanager
def lending_broadcasts() -> Iterator[None]:
    """Lend tensors to torch's `broadcast` too, which distributes the values of rank 0 when a model is set up."""
    broadcast = dist.broadcast

    def lending(tensor: Tensor, *args: Any, **options: Any) -> Any:
        return broadcast(lent(tensor), *args, **options)

    dist.broadcast = lending
    try:
        yield
    finally:
        dist.broadcast = broadcast


class _All:
    """Several collectives, waited for together."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def lent(buffer: Tensor) -> Tensor:
    """Return a view of the buffer's memory that does not keep it alive."""
    if not buffer.numel():
        return buffer
    assert buffer.is_contiguous()
    memory = (ctypes.c_char * buffer.nbytes).from_address(buffer.data_ptr())
    return torch.frombuffer(memory, dtype=buffer.dtype).view(buffer.shape)
