"""The ranks that save and load together, on a group of their own."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.comm.agreement import exchange
from shardwise.comm.groups import Group
from shardwise.errors import CheckpointError

T = TypeVar("T")


class Ranks:
    """The job, or this process alone where there is none.

    The group is Gloo's and nobody else's: what a background thread exchanges cannot come between the collectives of
    training, which must be issued in one order on every rank.
    """

    def __init__(self) -> None:
        self.group: Group | None = None
        if dist.is_available() and dist.is_initialized():
            ranks = tuple(range(dist.get_world_size()))
            handle = dist.new_group(list(ranks), backend="gloo")
            self.group = Group(handle=handle, ranks=ranks, index=dist.get_rank())

    @property
    def outdated(self) -> bool:
        """Whether a job has come to be since."""
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
        """What `action` gives on each rank; if it fails on one, it fails on all. Collective."""
        if self.group is None:
            return [action()]
        failure: Exception | None = None
        result: T | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        everyone = exchange((result, None if failure is None else one_line(failure)), group=self.group)
        if failure is not None:
            raise failure
        for rank, (_, line) in enumerate(everyone):
            if line is not None:
                raise CheckpointError(f"rank {rank} could not continue: {line}")
        return [theirs for theirs, _ in everyone]

    def leave(self) -> None:
        """Give the group up. Collective."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group.handle)
        self.group = None


def one_line(error: BaseException) -> str:
    """An exception as one line: what it says, and what it is unless that says enough."""
    text = " ".join(str(error).split())
    return text if isinstance(error, CheckpointError) and text else f"{type(error).__name__}: {text}"
