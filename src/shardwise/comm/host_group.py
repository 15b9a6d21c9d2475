"""Collectives between CPUs, for what ranks agree on from step to step without waiting for the device."""

from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.groups import job_timeout


class HostGroup:
    """A Gloo group of all ranks. Every rank makes the same calls in the same order."""

    def __init__(self) -> None:
        # In a rehearsal the other ranks are absent.
        self._alone = dist.get_world_size() == 1 or dist.get_backend() == "fake"
        self._handle = None if self._alone else dist.new_group(backend="gloo", timeout=job_timeout())

    def all_same(self, number: int) -> bool:
        """Return whether every rank gave this number."""
        if self._alone:
            return True
        ends = torch.tensor([number, -number])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._handle)
        most, least = ends.tolist()
        return bool(most == -least)

    def gather(self, value: Any) -> list[Any]:
        """Return each rank's value, in rank order."""
        if self._alone:
            return [value]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, value, group=self._handle)
        return everyone
