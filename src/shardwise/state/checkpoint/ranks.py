"""The ranks that save and load together, in their own process group."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.base.errors import CheckpointError
from shardwise.comm.groups.agreement import any_rank, by_first, exchange, on_each_rank, together
from shardwise.comm.groups.groups import Group
from shardwise.comm.groups.small_collectives import merge_on_first

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
        """Return whether a process group was created after this object."""
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

    # The cost of these does not grow with the number of ranks, or with its logarithm.

    def together(self, action: Callable[[], T]) -> T:
        """Return this rank's result of `action`; raise on all if it fails on one. Collective."""
        if self.group is None:
            return action()
        return together(action, group=self.group, raises=CheckpointError, describe=one_line)

    def by_first(self, action: Callable[[], T]) -> T:
        """Return what `action` returns on rank 0; raise on all if it fails. Collective."""
        if self.group is None:
            return action()
        return by_first(action, group=self.group, raises=CheckpointError, describe=one_line)

    def any(self, condition: bool) -> bool:
        """Return whether the condition holds on any rank. Collective."""
        return condition if self.group is None else any_rank(condition, group=self.group)

    def failures(self, failure: T | None) -> dict[int, T]:
        """Return what failed on which rank, in the order of ranks; nothing if all is well. Collective."""
        if not self.any(failure is not None):
            return {}
        everyone = [failure] if self.group is None else exchange(failure, group=self.group)
        return {rank: one for rank, one in enumerate(everyone) if one is not None}

    def merge_on_first(self, value: T, merge: Callable[[T, T], T]) -> T | None:
        """Return what all ranks' values merge into, on rank 0, and None on the others. Collective."""
        return value if self.group is None else merge_on_first(value, merge, group=self.group)

    # The cost of this one does.

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
