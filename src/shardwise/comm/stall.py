"""From where all ranks stand: has the job stalled, and because of whom? No torch and no clock here.

A rank that is behind holds up the others; ranks that wait are ahead of it, or at the same operation. So a job has
stalled when the ranks that are furthest have waited for the limit, and

    a process has not answered for as long        it was stopped, or its machine or network is gone
    a rank further back has issued nothing for    its own code holds it: data, evaluation on one rank, an endless loop
    as long
    a rank has ended
    all ranks wait at one point                   the backend, or collectives that do not fit together

A pause that all ranks make alike (evaluation, saving) is none of these: nobody waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.comm.rank_progress import Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """`rank` is the first of those that hold up the others; `text` tells of all."""

    rank: int
    text: str


def find_stall(
    ranks: Sequence[Standing], *, limit_seconds: float, silence_seconds: float, waits_on_host: bool
) -> Stall | None:
    """Whom the others have waited for since `limit_seconds` or more, if there is somebody.

    silence_seconds   after which a process is said not to answer
    waits_on_host     a rank that waits for others does so inside a wait (Gloo); else its device does (NCCL)
    """
    # What a silent process said last may be old: it is at most where the others are.
    silent = [rank for rank in ranks if not rank.left and rank.silent_seconds >= silence_seconds]
    heard = [rank for rank in ranks if rank not in silent]
    here = [rank for rank in heard if not rank.left]
    if not here:
        return None
    furthest = max(rank.position for rank in here)
    waiting = [rank for rank in here if rank.position == furthest]
    if any(rank.idle_seconds < limit_seconds for rank in waiting):
        return None
    waits = any(rank.waits_for for rank in waiting) or not waits_on_host
    if not waits:
        return None
    if silent:
        seconds = max(rank.silent_seconds for rank in silent)
        # It took part in all that the others have done.
        where = f"at or before {_operation(waiting[0])}, step {waiting[0].step}, {waiting[0].phase}"
        return _told(silent, why=f"has not answered for {seconds:.0f} s", where=where, waiting=waiting)
    behind = [rank for rank in heard if rank.position < furthest]
    if behind:
        last = min(rank.position for rank in behind)
        held_by = [rank for rank in behind if rank.position == last]
        if all(rank.left or rank.idle_seconds >= limit_seconds for rank in held_by):
            why = "has ended" if held_by[0].left else f"has issued nothing for {held_by[0].idle_seconds:.0f} s"
            return _told(held_by, why=why, where=str(held_by[0]), waiting=waiting)
        return None
    left = [rank for rank in heard if rank.left]
    if left and waits_on_host:
        return _told(left, why="has ended", where=str(left[0]), waiting=waiting)
    if waits_on_host and all(rank.waits_for for rank in here):
        text = "all ranks wait and nothing arrives: " + "; ".join(
            f"rank {rank.rank} in {_operation(rank)}, step {rank.step}, {rank.phase}" for rank in here[:8]
        )
        return Stall(rank=here[0].rank, text=text)
    return None


def _told(stopped: Sequence[Standing], *, why: str, where: str, waiting: Sequence[Standing]) -> Stall:
    other = waiting[0]
    text = (
        f"{_ranks(stopped)} stopped ({why}): {where}; {_ranks(waiting)} waiting in {_operation(other)}, "
        f"step {other.step}, {other.phase}"
    )
    return Stall(rank=stopped[0].rank, text=text)


def _operation(waiting: Standing) -> str:
    """What a rank waits in; where only its device does, what it has issued last."""
    return waiting.waits_for or f"what follows on {waiting.last}"


def _ranks(standings: Sequence[Standing]) -> str:
    numbers = [str(standing.rank) for standing in standings]
    shown = ", ".join(numbers[:8]) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return ("rank " if len(numbers) == 1 else "ranks ") + shown
