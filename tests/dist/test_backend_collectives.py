"""The process group's own collectives, issued without torch.distributed's functions around them."""

import torch
from ranks import run_ranks, world_group
from torch import Tensor

from shardwise.comm.groups.collectives import BackendCollectives, own_slice


def complex_buffers(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a gather gives without and with a slice that was made before, and what a sum gives."""
    group, collectives = world_group(), BackendCollectives()
    buffers = [torch.full((4,), complex(rank + 1, -rank)) for _ in range(3)]
    collectives.all_gather(buffers[0], group=group).wait()
    collectives.all_gather(buffers[1], group=group, own=own_slice(buffers[1], group=group)).wait()
    collectives.all_reduce(buffers[2], group=group).wait()
    return buffers[0], buffers[1], buffers[2]


def test_buffers_of_complex_numbers_are_gathered_and_summed() -> None:
    for gathered, with_own, summed in run_ranks(complex_buffers, num_ranks=2):
        assert gathered.tolist() == with_own.tolist() == [1, 1, 2 - 1j, 2 - 1j]
        assert summed.tolist() == [3 - 1j] * 4
