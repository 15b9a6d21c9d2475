"""Collectives for a recording of memory on a CPU: what Gloo does to memory leaves no trace in it.

Gloo gathers through a buffer of its own, and its threads may be the last to let go of a tensor, a moment after the
wait, where the profiler does not follow them: a ledger would have both live on, now and then. So here

    a gather     is a broadcast of each rank's slice, in place: the same bytes, no buffer
    a tensor     is only lent: the backend gets its memory, which the engine holds until the wait, and frees itself

What a backend takes for itself is in no ledger on a GPU either.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.collectives import Collectives, Work
from shardwise.comm.groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class TracelessCollectives:
    """Others' collectives, so that nothing is seen of them."""

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
        self,
        received: Tensor,
        sent: Tensor,
        *,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        group: Group,
    ) -> Work:
        return self.inner.all_to_all(
            lent(received), lent(sent), received_sizes=received_sizes, sent_sizes=sent_sizes, group=group
        )


@contextmanager
def lending_broadcasts() -> Iterator[None]:
    """The same for torch's own `broadcast`, by which values come from rank 0 when a model is set up."""
    broadcast = dist.broadcast

    def lending(tensor: Tensor, *args: Any, **options: Any) -> Any:
        return broadcast(lent(tensor), *args, **options)

    dist.broadcast = lending
    try:
        yield
    finally:
        dist.broadcast = broadcast


class _All:
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def lent(buffer: Tensor) -> Tensor:
    """The same memory, which is `buffer`'s alone to free."""
    if not buffer.numel():
        return buffer
    assert buffer.is_contiguous()
    memory = (ctypes.c_char * buffer.nbytes).from_address(buffer.data_ptr())
    return torch.frombuffer(memory, dtype=buffer.dtype).view(buffer.shape)
