"""The collectives that the engine uses: asynchronous, and all but one in place. `BackendCollectives` are torch's.

They work in place because the engine's buffers are laid out so that nothing has to be copied in or out: in a buffer of
W equal slices, slice i belongs to the group's i-th rank.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.base.torch_internals import torch_private
from shardwise.base.torch_internals.torch_private import AllgatherOptions, AllreduceOptions, ReduceScatterOptions
from shardwise.comm.groups.groups import Group
from shardwise.comm.groups.issued import NotedWork


class Work(Protocol):
    """A collective that was issued."""

    def wait(self) -> object:
        """Return when the result may be used; on a GPU at once, since the current stream waits."""


class _Done:
    """A collective in a group of one rank, which is over as soon as it is issued."""

    def wait(self) -> None:
        pass


DONE: Work = _Done()


class Collectives(Protocol):
    """Until `wait` returns, the buffer must not be read, written or freed.

    own   `own_slice` of the buffer, if the caller keeps it
    """

    def all_gather(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        """Fill slice i of `buffer` from rank i, for all i."""

    def reduce_scatter(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        """Replace this rank's slice of `buffer` by the sum over the ranks; the other slices become undefined."""

    def all_reduce(self, buffer: Tensor, *, group: Group) -> Work:
        """Replace `buffer` by the sum over the ranks."""

    def broadcast(self, buffer: Tensor, *, source: int, group: Group) -> Work:
        """Fill `buffer` from the group's `source`-th rank."""

    def all_to_all(
        self, received: Tensor, sent: Tensor, *, received_sizes: Sequence[int], sent_sizes: Sequence[int], group: Group
    ) -> Work:
        """Send the i-th piece of `sent` to rank i, and receive the i-th of `received` from it; sizes in elements."""


def own_slice(buffer: Tensor, *, group: Group) -> Tensor:
    """Return the slice of a buffer of `group.size` equal slices that belongs to this rank."""
    size = buffer.numel() // group.size
    return buffer[group.index * size : (group.index + 1) * size]


class BackendCollectives:
    """The process group's own collectives, each logged in its group as it is issued. In a step a rank that is alone in
    its group issues none, by a rule of the program (`Operation.is_local`).

    Those of every step call the process group directly: torch.distributed's functions check their arguments and make
    the same options again on each call.
    """

    def __init__(self) -> None:
        self._gathers, self._scatters, self._reduces = AllgatherOptions(), ReduceScatterOptions(), AllreduceOptions()
        for options in (self._gathers, self._scatters, self._reduces):
            options.asyncOp = True

    def all_gather(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        name = group.log.note(buffer)
        own = own_slice(buffer, group=group) if own is None else own
        gather = torch_private.all_gather_single
        return NotedWork(gather(group.handle, as_moved(buffer), as_moved(own), self._gathers), name)

    def reduce_scatter(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        if buffer.device.type == "cpu":
            # Gloo's reduce-scatter takes twice as long as its all-reduce of the same buffer.
            return self.all_reduce(buffer, group=group)
        name = group.log.note(buffer)
        own = own_slice(buffer, group=group) if own is None else own
        reduce_scatter = torch_private.reduce_scatter_single
        return NotedWork(reduce_scatter(group.handle, _in_reals(own), _in_reals(buffer), self._scatters), name)

    def all_reduce(self, buffer: Tensor, *, group: Group) -> Work:
        name = group.log.note(buffer)
        return NotedWork(group.handle.allreduce([_in_reals(buffer)], self._reduces), name)

    def broadcast(self, buffer: Tensor, *, source: int, group: Group) -> Work:
        name = group.log.note(buffer)
        work: Work = dist.broadcast(as_moved(buffer), src=group.ranks[source], group=group.handle, async_op=True)
        return NotedWork(work, name)

    def all_to_all(
        self, received: Tensor, sent: Tensor, *, received_sizes: Sequence[int], sent_sizes: Sequence[int], group: Group
    ) -> Work:
        name = group.log.note(None)
        sizes = list(received_sizes), list(sent_sizes)
        work: Work = dist.all_to_all_single(received, sent, *sizes, group=group.handle, async_op=True)
        return NotedWork(work, name)


# What every backend can send; complex numbers are sent as pairs of reals.
_SENT = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8)


def as_moved(buffer: Tensor) -> Tensor:
    """View a contiguous tensor that is only copied to other ranks as numbers that every backend can send."""
    if buffer.is_complex() or buffer.dtype in _SENT:
        return _in_reals(buffer)
    return buffer.view(-1).view(torch.uint8)


def _in_reals(buffer: Tensor) -> Tensor:
    """View complex numbers as pairs of reals, which every backend can add."""
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer
