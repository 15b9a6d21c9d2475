"""Ranks that must agree, or at least be there, before they trust each other.

exchange   what every rank gave, on every rank
agree      all ranks describe the same thing, or all of them raise
meet       all ranks have come to a point, or the missing ones are named
"""

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardwise.comm.groups import Group
from shardwise.comm.rank_progress import waiting_in
from shardwise.errors import ShardwiseError


class RanksDisagree(ShardwiseError):  # noqa: N818
    """Ranks were given different plans or models, or one of them could not continue."""


class RanksMissing(ShardwiseError):  # noqa: N818
    """Some ranks did not come to what needs all of them."""


def exchange(value: Any, *, group: Group | None = None) -> list[Any]:
    """What each rank of the group (of the job, without one) gave, in rank order. Collective."""
    everyone = [None] * (dist.get_world_size() if group is None else group.size)
    # Groups of a mesh may do this more or less often than others.
    with waiting_in("an exchange between ranks", counts=group is None):
        dist.all_gather_object(everyone, value, group=None if group is None else group.handle)
    return everyone


def agree(describe: Callable[[], str], *, what: str) -> None:
    """Every rank must describe the same thing; a rank that cannot says why, on all of them.

    Collective. Without it one rank's mistake would leave the others waiting for it.
    """
    failure: ShardwiseError | None = None
    try:
        mine = "=" + describe()
    except ShardwiseError as error:
        failure = error
        mine = "!" + str(error)
    everyone = exchange(mine)
    if failure is not None:
        raise failure
    for rank, other in enumerate(everyone):
        if other.startswith("!"):
            raise RanksDisagree(f"rank {rank} could not continue: {other[1:]}")
    different = [rank for rank, description in enumerate(everyone) if description != everyone[0]]
    if different:
        first = different[0]
        raise RanksDisagree(
            f"rank 0 and rank {first} were given different {what}: {_difference(everyone[0], everyone[first])}"
        )


# What all ranks have come to so far: its length numbers the next meeting, the same on every rank.
_HELD: list[str] = []


def meet(what: str, *, limit_seconds: float = 60.0) -> None:
    """Wait until every rank has come to `what`; within the limit, or the missing ranks are named.

    For what users may call on one rank by mistake (`if rank == 0: model.state_dict()`), where a collective would only
    hang. Over the job's store, so that it needs no collective itself.
    """
    if dist.get_backend() == "fake":
        # A rehearsal (absent.py): nobody else will come.
        return
    store = dist.distributed_c10d._get_default_store()
    meeting = len(_HELD)
    mine = f"shardwise/{meeting}/{dist.get_rank()}"
    store.set(mine, what)
    deadline = time.monotonic() + limit_seconds
    missing = list(range(dist.get_world_size()))
    while missing:
        missing = [rank for rank in missing if not store.check([f"shardwise/{meeting}/{rank}"])]
        if missing and time.monotonic() > deadline:
            # It was not held: whoever continues from here counts as the others do.
            store.delete_key(mine)
            ranks = ", ".join(map(str, missing))
            raise RanksMissing(
                f"rank {ranks} did not come to {what} within {limit_seconds:.0f} s: call it on every rank"
            )
        if missing:
            time.sleep(0.002)
    _HELD.append(what)


def _difference(one: str, other: str) -> str:
    """The first line in which two descriptions differ."""
    for ours, theirs in zip(one[1:].splitlines(), other[1:].splitlines(), strict=False):
        if ours != theirs:
            return f"{ours.strip()} | {theirs.strip()}"
    return "one has more than the other"
