"""What ranks agree on from one step to the next, on their CPUs: the device is not waited for."""

from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.groups import job_timeout


class HostGroup:
    """All ranks of the job. Its calls are collective: every rank makes the same ones in the same order."""

    def __init__(self) -> None:
        # Ranks of a rehearsal are alone, whatever their number.
        self._alone = dist.get_world_size() == 1 or dist.get_backend() == "fake"
        self._handle = None if self._alone else dist.new_group(backend="gloo", timeout=job_timeout())

    def all_same(self, number: int) -> bool:
        """Whether every rank gave this number."""
        if self._alone:
            return True
        ends = torch.tensor([number, -number])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._handle)
        most, least = ends.tolist()
        return bool(most == -least)

    def gather(self, value: Any) -> list[Any]:
        """What each rank gave, in rank order."""
        if self._alone:
            return [value]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, value, group=self._handle)
        return everyone
