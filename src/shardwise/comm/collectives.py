"""The collectives that the engine uses, all asynchronous and but one in place; torch's own are one set of them.

In place, because the engine's buffers are laid out so that nothing has to be copied in or out: of a buffer
of W equal slices, slice i belongs to the group's i-th rank.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions

from shardwise.comm.groups import Group
from shardwise.comm.issued import NotedWork

# A process group's own methods; torch 2.13 gave them other names.
_ALL_GATHER = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
_REDUCE_SCATTER = (
    "reduce_scatter_single" if hasattr(dist.ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"
)


class Work(Protocol):
    """A collective that is under way."""

    def wait(self) -> object:
        """Return when the result may be used: at once, on the current stream, for a GPU's."""


class _Done:
    """A collective in a group of one rank, which is over as soon as it is issued."""

    def wait(self) -> None:
        pass


DONE: Work = _Done()


class Collectives(Protocol):
    """Until `wait` returns, nobody may read, write or free the buffer.

    own   `own_slice` of the buffer, from a caller that has made it once and for all
    """

    def all_gather(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        """Slice i of `buffer` is taken from rank i, for all i."""

    def reduce_scatter(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        """This rank's slice of `buffer` becomes the sum over the ranks; the other slices become undefined."""

    def all_reduce(self, buffer: Tensor, *, group: Group) -> Work:
        """`buffer` becomes the sum over the ranks."""

    def broadcast(self, buffer: Tensor, *, source: int, group: Group) -> Work:
        """`buffer` is taken from the group's `source`-th rank."""

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        *,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        group: Group,
    ) -> Work:
        """The i-th piece of `sent` goes to rank i, and the i-th of `received` comes from there; sizes in elements."""


def own_slice(buffer: Tensor, *, group: Group) -> Tensor:
    """The part of a buffer of `group.size` equal slices that belongs to this rank."""
    size = buffer.numel() // group.size
    return buffer[group.index * size : (group.index + 1) * size]


class BackendCollectives:
    """The process group's own collectives, each noted down in its group as it is issued. In a step a rank that is alone
    in its group issues none, by a rule of the program (`Operation.is_local`).

    The ones of every step are called without torch.distributed's functions around them, which check their arguments and
    make the same options anew each time.
    """

    def __init__(self) -> None:
        self._gathers, self._scatters, self._reduces = AllgatherOptions(), ReduceScatterOptions(), AllreduceOptions()
        for options in (self._gathers, self._scatters, self._reduces):
            options.asyncOp = True

    def all_gather(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        name = group.log.note(buffer)
        own = own_slice(buffer, group=group) if own is None else own
        if buffer.is_complex():
            buffer, own = _in_reals(buffer), _in_reals(own)
        return NotedWork(getattr(group.handle, _ALL_GATHER)(buffer, own, self._gathers), name)

    def reduce_scatter(self, buffer: Tensor, *, group: Group, own: Tensor | None = None) -> Work:
        if buffer.device.type == "cpu":
            # Gloo's reduce-scatter takes twice as long as its all-reduce of the same buffer.
            return self.all_reduce(buffer, group=group)
        name = group.log.note(buffer)
        own = own_slice(buffer, group=group) if own is None else own
        if buffer.is_complex():
            buffer, own = _in_reals(buffer), _in_reals(own)
        return NotedWork(getattr(group.handle, _REDUCE_SCATTER)(own, buffer, self._scatters), name)

    def all_reduce(self, buffer: Tensor, *, group: Group) -> Work:
        name = group.log.note(buffer)
        if buffer.is_complex():
            buffer = _in_reals(buffer)
        return NotedWork(group.handle.allreduce([buffer], self._reduces), name)

    def broadcast(self, buffer: Tensor, *, source: int, group: Group) -> Work:
        name = group.log.note(buffer)
        work: Work = dist.broadcast(buffer, src=group.ranks[source], group=group.handle, async_op=True)
        return NotedWork(work, name)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        *,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        group: Group,
    ) -> Work:
        name = group.log.note(None)
        sizes = list(received_sizes), list(sent_sizes)
        work: Work = dist.all_to_all_single(received, sent, *sizes, group=group.handle, async_op=True)
        return NotedWork(work, name)


def _in_reals(buffer: Tensor) -> Tensor:
    """No backend knows complex numbers; a sum of them is that of their parts."""
    return torch.view_as_real(buffer)
