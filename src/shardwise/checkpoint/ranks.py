"""The ranks that save and load together, in their own process group."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.comm.agreement import on_each_rank
from shardwise.comm.groups import Group
from shardwise.errors import CheckpointError

T = TypeVar("T")


class Ranks:
    """The ranks of the job, or this process alone without a job.

    Its Gloo group is used for nothing else, so that the exchanges of a background thread cannot change the order of
    the collectives of training, which must be the same on every rank.
    """

    def __init__(self) -> None:
        self.group: Group | None = None
        if dist.is_available() and dist.is_initialized():
            ranks = tuple(range(dist.get_world_size()))
            handle = dist.new_group(list(ranks), backend="gloo")
            self.group = Group(handle=handle, ranks=ranks, index=dist.get_rank())

    @property
    def outdated(self) -> bool:
        """Whether a process group was created after this object."""
        return self.group is None and dist.is_available() and dist.is_initialized()

    @property
    def index(self) -> int:
        return 0 if self.group is None else self.group.index

    @property
    def count(self) -> int:
        return 1 if self.group is None else self.group.size

    @property
    def handle(self) -> Any:
        return None if self.group is None else self.group.handle

    def each(self, action: Callable[[], T]) -> list[T]:
        """Return the result of `action` on each rank; raise on all if it fails on one. Collective."""
        if self.group is None:
            return [action()]
        return on_each_rank(action, group=self.group, catches=Exception, raises=CheckpointError, describe=one_line)

    def leave(self) -> None:
        """Destroy the group. Collective."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group.handle)
        self.group = None


def one_line(error: BaseException) -> str:
    """Format an exception as one line, with its type unless it is a CheckpointError."""
    text = " ".join(str(error).split())
    return text if isinstance(error, CheckpointError) and text else f"{type(error).__name__}: {text}"
