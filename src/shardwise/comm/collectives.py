"""The collectives that the engine uses, all asynchronous and but one in place; torch's own are one set of them.

In place, because the engine's buffers are laid out so that nothing has to be copied in or out: of a buffer
of W equal slices, slice i belongs to the group's i-th rank.
"""

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from shardwise.comm.groups import Group
from shardwise.comm.issued import NotedWork

# torch 2.13 renamed them and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Work(Protocol):
    """A collective that is under way."""

    def wait(self) -> object:
        """Return when the result may be used: at once, on the current stream, for a GPU's."""


class Collectives(Protocol):
    """Until `wait` returns, nobody may read, write or free the buffer."""

    def all_gather(self, buffer: Tensor, *, group: Group) -> Work:
        """Slice i of `buffer` is taken from rank i, for all i."""

    def reduce_scatter(self, buffer: Tensor, *, group: Group) -> Work:
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
    """The process group's own collectives, each noted down in its group as it is issued."""

    def all_gather(self, buffer: Tensor, *, group: Group) -> Work:
        name = group.log.note(buffer)
        work: Work = _all_gather(buffer, own_slice(buffer, group=group), group=group.handle, async_op=True)
        return NotedWork(work, name)

    def reduce_scatter(self, buffer: Tensor, *, group: Group) -> Work:
        if buffer.device.type == "cpu":
            # Gloo's reduce-scatter takes twice as long as its all-reduce of the same buffer.
            return self.all_reduce(buffer, group=group)
        name = group.log.note(buffer)
        work: Work = _reduce_scatter(own_slice(buffer, group=group), buffer, group=group.handle, async_op=True)
        return NotedWork(work, name)

    def all_reduce(self, buffer: Tensor, *, group: Group) -> Work:
        name = group.log.note(buffer)
        work: Work = dist.all_reduce(buffer, group=group.handle, async_op=True)
        return NotedWork(work, name)

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
