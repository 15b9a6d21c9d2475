"""Checks that ranks agree, or at least are present, before they depend on each other.

together       returns this rank's result of a function; raises on all ranks if it fails on one
by_first       returns the first rank's result of a function; raises on all ranks if it fails
agree          raises on all ranks unless all describe the same thing
distinct       returns the values that ranks have, without repetitions
meet           waits until all ranks have reached a point, and names the missing ones and those that are elsewhere
exchange       returns every rank's value, on every rank
on_each_rank   returns every rank's result of a function; raises on all ranks if it fails on one

The cost of the last two grows with the number of ranks, in time and memory. The others compare numbers first, and
exchange texts only to report a difference.
"""

import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.base.errors import ShardwiseError
from shardwise.base.torch_internals import torch_private
from shardwise.base.torch_internals.torch_private import Store
from shardwise.comm.groups.groups import Group
from shardwise.comm.groups.rank_progress import meeting_in, waiting_in
from shardwise.comm.groups.small_collectives import from_first, largest

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
    result, failure = _attempted(action, catches=catches)
    everyone = exchange((result, None if failure is None else describe(failure)), group=group)
    _raise_first(failure, [line for _, line in everyone], group=group, raises=raises)
    return [theirs for theirs, _ in everyone]


def together(
    action: Callable[[], T],
    *,
    group: Group | None = None,
    raises: type[ShardwiseError] = RanksDisagree,
    describe: Callable[[Exception], str] | None = None,
) -> T:
    """Return this rank's result of `action`; raise on all ranks if it fails on one, with whatever error. Collective."""
    result, failure = _attempted(action, catches=Exception)
    if any_rank(failure is not None, group=group):
        # Without their results, which may be nothing that can be sent.
        lines = exchange(None if failure is None else (describe or _in_one_line)(failure), group=group)
        _raise_first(failure, lines, group=group, raises=raises)
    return result  # type: ignore[return-value]


def _attempted(action: Callable[[], T], *, catches: type[Exception]) -> tuple[T | None, Exception | None]:
    """Return the result of `action` and None, or None and its error."""
    try:
        return action(), None
    except catches as error:
        return None, error


def _raise_first(
    failure: Exception | None, lines: Sequence[str | None], *, group: Group | None, raises: type[ShardwiseError]
) -> None:
    """Raise this rank's own failure, or else what the first rank with a line says; do nothing if there is none."""
    if failure is not None:
        raise failure
    for index, line in enumerate(lines):
        if line is not None:
            rank = index if group is None else group.ranks[index]
            raise about(raises(f"rank {rank} could not continue: {line}"), rank)


def about(error: ShardwiseError, rank: int | None) -> ShardwiseError:
    """Return the error with the rank that it is about, so that it is not taken for the cause while that rank ends."""
    error.peer = rank
    return error


def by_first(
    action: Callable[[], T],
    *,
    group: Group | None = None,
    raises: type[ShardwiseError] = RanksDisagree,
    describe: Callable[[Exception], str] | None = None,
) -> T:
    """Return on every rank what `action` returns on the first; raise on all ranks if it fails there. Collective."""
    is_first = (dist.get_rank() if group is None else group.index) == 0
    result = together(lambda: action() if is_first else None, group=group, raises=raises, describe=describe)
    with waiting_in("an exchange between ranks", counts=group is None):
        return from_first(result, group=group)  # type: ignore[return-value]


def any_rank(condition: bool, *, group: Group | None = None) -> bool:
    """Return whether the condition holds on any rank. Collective."""
    with waiting_in("an exchange between ranks", counts=group is None):
        return bool(largest([condition], group=group)[0])


def all_alike(text: str, *, group: Group | None = None) -> bool:
    """Return whether all ranks have the same text. Collective."""
    number = int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")
    with waiting_in("an exchange between ranks", counts=group is None):
        most, negated_least = largest([number, -number], group=group)
    return most == -negated_least


def distinct(value: T, *, text: str = "", group: Group | None = None) -> list[T]:
    """Return the ranks' different values: one if all are alike. Collective.

    `text` describes the value, if it is not a text itself.
    """
    if all_alike(text or str(value), group=group):
        return [value]
    return list(dict(exchange((text or value, value), group=group)).values())


def _in_one_line(error: Exception) -> str:
    said = (str(error).splitlines() or [""])[0]
    return said if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {said}"


def agree(describe: Callable[[], str], *, what: str) -> None:
    """Raise on every rank unless all describe the same thing, or if one cannot describe it. Collective."""
    check_alike(together(describe), what=what)


def check_alike(description: str, *, what: str) -> None:
    """Raise on every rank unless all have the same description. Collective."""
    if all_alike(description):
        return
    everyone = exchange(description)
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
        _meet(torch_private.default_store(), what, limit_seconds=limit_seconds)
    except dist.DistNetworkError as error:
        raise RanksMissing(
            f"this rank waits in {what}, which needs all ranks, and the process with the job's store (usually rank 0) "
            "has ended: call it on every rank"
        ) from error


def _meet(store: Store, what: str, *, limit_seconds: float) -> None:
    """Count the ranks that come; only an error reads what each of them has written."""
    num_ranks, meeting = dist.get_world_size(), f"shardwise/{len(_HELD)}"
    everyone, here = f"{meeting}/count", f"{meeting}/count of {what}"
    store.set(f"{meeting}/{dist.get_rank()}", what)
    store.add(here, 1)
    num_come = store.add(everyone, 1)
    deadline = time.monotonic() + limit_seconds
    with meeting_in(what):
        while num_come < num_ranks:
            if time.monotonic() > deadline:
                keys = [f"{meeting}/{rank}" for rank in range(num_ranks)]
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                # The meeting was not held: a rank that continues counts as the others do.
                store.add(everyone, -1)
                store.add(here, -1)
                store.delete_key(keys[dist.get_rank()])
                line = f"rank {', '.join(map(str, missing))} did not come to {what} within {limit_seconds:.0f} s"
                raise about(RanksMissing(f"{line}: call it on every rank"), missing[0])
            time.sleep(0.002)
            num_come = int(store.get(everyone))
    _HELD.append(what)
    if int(store.get(here)) == num_ranks:
        return
    for rank in range(num_ranks):
        other = store.get(f"{meeting}/{rank}").decode()
        if other != what:
            one, other = (f"rank {dist.get_rank()} in {what}", f"rank {rank} in {other}")
            raise RanksDisagree(f"{one} and {other}: each of them needs all ranks; call both on every rank")


def _difference(one: str, other: str) -> str:
    """Return the first line in which two descriptions differ."""
    for ours, theirs in zip(one.splitlines(), other.splitlines(), strict=False):
        if ours != theirs:
            return f"{ours.strip()} | {theirs.strip()}"
    return "one has more than the other"
