"""Collectives of small values over many ranks: the number of rounds grows with the logarithm of the number of ranks.

largest          the largest of all ranks' numbers, on every rank
from_first       what the first rank has, on every rank
merge_on_first   what all ranks' values merge into, on the first rank

Gloo's own all-reduce and gathers go around a ring, in as many rounds as there are ranks.
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.groups.groups import Group

T = TypeVar("T")


def largest(numbers: Sequence[int], *, group: Group | None = None) -> list[int]:
    """Return the largest of all ranks' first numbers, of their second ones and so on. Collective.

    In round i each rank sends what it knows to the rank that is 2^i after it, so that after round i it knows the
    largest of 2^(i+1) ranks. That some of them are counted twice does not change the largest.
    """
    handle = None if group is None else group.handle
    ranks = range(dist.get_world_size()) if group is None else group.ranks
    index = dist.get_rank() if group is None else group.index
    if len(ranks) == 1 or dist.get_backend(handle) == "fake":
        return list(numbers)
    if dist.get_backend(handle) != "gloo":
        # NCCL has trees of its own.
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
        known = torch.tensor(numbers, dtype=torch.int64, device=device)
        dist.all_reduce(known, op=dist.ReduceOp.MAX, group=handle)
        return known.tolist()
    known, received = torch.tensor(numbers, dtype=torch.int64), torch.empty(len(numbers), dtype=torch.int64)
    distance = 1
    while distance < len(ranks):
        sending = dist.isend(known, dst=ranks[(index + distance) % len(ranks)], group=handle)
        dist.recv(received, src=ranks[index - distance], group=handle)
        assert sending is not None
        sending.wait()
        known = torch.maximum(known, received)
        distance *= 2
    return known.tolist()


def from_first(value: T, *, group: Group | None = None) -> T:
    """Return the first rank's value on every rank of the group (default: of the job). Collective."""
    sent = [value]
    first = 0 if group is None else group.ranks[0]
    dist.broadcast_object_list(sent, src=first, group=None if group is None else group.handle)
    return sent[0]


def merge_on_first(value: T, merge: Callable[[T, T], T], *, group: Group) -> T | None:
    """Return what the ranks' values merge into, in rank order, on the first rank, and None on the others. Collective.

    In round i each rank whose index is an odd multiple of 2^i sends what it has to the one 2^i before it, and is done.
    The group must be of Gloo.
    """
    distance = 1
    while distance < group.size:
        if group.index % (2 * distance):
            _send(value, to=group.ranks[group.index - distance], group=group)
            return None
        if group.index + distance < group.size:
            value = merge(value, _receive(group.ranks[group.index + distance], group=group))
        distance *= 2
    return value


def _send(value: Any, *, to: int, group: Group) -> None:
    content = _bytes(pickle.dumps(value))
    dist.send(torch.tensor([content.numel()]), dst=to, group=group.handle)
    dist.send(content, dst=to, group=group.handle)


def _receive(sender: int, *, group: Group) -> Any:
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, src=sender, group=group.handle)
    content = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(content, src=sender, group=group.handle)
    return pickle.loads(content.numpy().tobytes())


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
