"""Checks that ranks agree, or at least are present, before they depend on each other.

exchange       returns every rank's value, on every rank
on_each_rank   returns every rank's result of a function; raises on all ranks if it fails on one
agree          raises on all ranks unless all describe the same thing
meet           waits until all ranks have reached a point, and names the missing ones and those that are elsewhere
"""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from shardwise.comm.groups import Group
from shardwise.comm.rank_progress import meeting_in, waiting_in
from shardwise.errors import ShardwiseError

T = TypeVar("T")


class RanksDisagree(ShardwiseError):  # noqa: N818
    """Ranks were given different plans or models, or one of them could not continue."""


class RanksMissing(ShardwiseError):  # noqa: N818
    """Some ranks did not come to what needs all of them."""


def exchange(value: Any, *, group: Group | None = None) -> list[Any]:
    """Return the value of each rank of the group (default: of the job), in rank order. Collective."""
    everyone = [None] * (dist.get_world_size() if group is None else group.size)
    # Groups of a mesh may call this a different number of times.
    with waiting_in("an exchange between ranks", counts=group is None):
        dist.all_gather_object(everyone, value, group=None if group is None else group.handle)
    return everyone


def on_each_rank(
    action: Callable[[], T],
    *,
    group: Group | None = None,
    catches: type[Exception] = ShardwiseError,
    raises: type[ShardwiseError] = RanksDisagree,
    describe: Callable[[Exception], str] = str,
) -> list[T]:
    """Return the result of `action` on each rank. Collective.

    A rank where it fails raises its error, if that is one of `catches`, and the other ranks raise `raises` instead of
    waiting. Any other error ends the rank's process, and with it the job.
    """
    failure: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except catches as error:
        failure = error
    everyone = exchange((result, None if failure is None else describe(failure)), group=group)
    if failure is not None:
        raise failure
    for rank, (_, line) in enumerate(everyone):
        if line is not None:
            raise raises(f"rank {rank} could not continue: {line}")
    return [theirs for theirs, _ in everyone]


def together(action: Callable[[], T]) -> T:
    """Return this rank's result of `action`; raise on all ranks if it fails on one, with whatever error. Collective."""
    results: list[T] = []
    on_each_rank(lambda: results.append(action()), catches=Exception, describe=_in_one_line)
    return results[0]


def _in_one_line(error: Exception) -> str:
    said = (str(error).splitlines() or [""])[0]
    return said if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {said}"


def agree(describe: Callable[[], str], *, what: str) -> None:
    """Raise on every rank unless all describe the same thing, or if one cannot describe it. Collective."""
    everyone = on_each_rank(describe, catches=Exception, describe=_in_one_line)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            difference = _difference(everyone[0], other)
            raise RanksDisagree(f"rank 0 and rank {rank} were given different {what}: {difference}")


# The meetings that all ranks have come to. Their number is the next meeting's, the same on every rank.
_HELD: list[str] = []


def meet(what: str, *, limit_seconds: float = 60.0) -> None:
    """Wait until every rank has come to `what`; after the limit, raise an error that names the missing ranks.

    For calls that users may make on one rank by mistake (`if rank == 0: model.state_dict()`), where a collective would
    hang. It uses the job's store, and so needs no collective itself. A rank that has gone on to something else is named
    as soon as the watchdog sees it (stall.py).
    """
    if dist.get_world_size() == 1 or dist.get_backend() == "fake":
        # In a rehearsal (absent.py) no other rank will come.
        return
    try:
        _meet(dist.distributed_c10d._get_default_store(), what, limit_seconds=limit_seconds)
    except dist.DistNetworkError as error:
        raise RanksMissing(
            f"this rank waits in {what}, which needs all ranks, and the process with the job's store (usually rank 0) "
            "has ended: call it on every rank"
        ) from error


def _meet(store: Store, what: str, *, limit_seconds: float) -> None:
    keys = [f"shardwise/{len(_HELD)}/{rank}" for rank in range(dist.get_world_size())]
    mine = keys[dist.get_rank()]
    store.set(mine, what)
    deadline = time.monotonic() + limit_seconds
    with meeting_in(what):
        while not store.check(keys):
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                # The meeting was not held: a rank that continues counts as the others do.
                store.delete_key(mine)
                raise RanksMissing(
                    f"rank {', '.join(map(str, missing))} did not come to {what} within {limit_seconds:.0f} s: call it "
                    "on every rank"
                )
            time.sleep(0.002)
    _HELD.append(what)
    for rank, other in enumerate(_read(store, keys)):
        if other != what:
            one, other = (f"rank {dist.get_rank()} in {what}", f"rank {rank} in {other}")
            raise RanksDisagree(f"{one} and {other}: each of them needs all ranks; call both on every rank")


def _read(store: Store, keys: list[str]) -> list[str]:
    # One request where the store can do it.
    extended = store.has_extended_api()  # type: ignore[attr-defined]
    values = store.multi_get(keys) if extended else [store.get(key) for key in keys]
    return [value.decode() for value in values]


def _difference(one: str, other: str) -> str:
    """Return the first line in which two descriptions differ."""
    for ours, theirs in zip(one.splitlines(), other.splitlines(), strict=False):
        if ours != theirs:
            return f"{ours.strip()} | {theirs.strip()}"
    return "one has more than the other"
