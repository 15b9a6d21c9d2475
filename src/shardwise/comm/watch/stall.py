"""Decides from the standings of all ranks whether the job has stalled, and which rank caused it. No torch, no clock.

A rank that is behind blocks the others; ranks that wait are ahead of it, or at the same operation. So a job has
stalled when the ranks that are furthest ahead have waited for the limit, and

    a process has not answered for as long          it was stopped, or its machine or network is gone
    a rank behind has issued nothing for as long    its own code blocks: data, evaluation on one rank, an endless loop
    a rank has ended
    all ranks wait at the same point                the backend, or collectives that do not match

A pause of all ranks together (evaluation, saving) is not a stall: no rank waits.

A call that needs all ranks, made on some of them, is found without waiting for the limit: the others have gone on, and
will never come to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.comm.groups.rank_progress import BACKWARD, BETWEEN_STEPS, EVALUATION, FORWARD, NO_GRAD_FORWARD, Standing

_UNEVEN = "; where a rank's data end before those of others, use `for batch in shardwise.join(model, loader):`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """`rank` is the first of the ranks that block the others; `text` describes all of them."""

    rank: int
    text: str


def find_stall(
    ranks: Sequence[Standing], *, limit_seconds: float, silence_seconds: float, waits_on_host: bool
) -> Stall | None:
    """Return the ranks that others have waited for during `limit_seconds` or more, if there are any.

    silence_seconds   after which a process counts as not answering
    waits_on_host     a waiting rank blocks inside `wait` (Gloo); otherwise its device waits (NCCL)
    """
    # The last message of a silent process may be old, so its position is not compared.
    silent = [rank for rank in ranks if not rank.left and rank.silent_seconds >= silence_seconds]
    heard = [rank for rank in ranks if rank not in silent]
    here = [rank for rank in heard if not rank.left]
    if not here:
        return None
    furthest = max(rank.position for rank in here)
    waiting = [rank for rank in here if rank.position == furthest]
    if any(rank.idle_seconds < limit_seconds for rank in waiting):
        return None
    if waits_on_host and not any(rank.waits_for for rank in waiting):
        return None
    # What the limit is compared with: how long all those that are furthest ahead have waited.
    held_up = f"has held up the others for {min(rank.idle_seconds for rank in waiting):.0f} s"
    if silent:
        # It cannot be further: the others have completed nothing without it.
        where = f"at or before {_operation(waiting[0])}, step {waiting[0].step}, {waiting[0].phase}"
        return _describe(silent, why=f"{held_up} and does not answer", where=where, waiting=waiting)
    behind = [rank for rank in heard if rank.position < furthest]
    if behind:
        last = min(rank.position for rank in behind)
        blocking = [rank for rank in behind if rank.position == last]
        if all(rank.left or rank.idle_seconds >= limit_seconds for rank in blocking):
            why = "has ended" if blocking[0].left else f"{held_up} and issues nothing"
            return _describe(blocking, why=why, where=str(blocking[0]), waiting=waiting)
        return None
    left = [rank for rank in heard if rank.left]
    if left and waits_on_host:
        return _describe(left, why="has ended", where=str(left[0]), waiting=waiting)
    if waits_on_host and all(rank.waits_for for rank in here):
        text = "all ranks wait and nothing arrives: " + "; ".join(
            f"rank {rank.rank} in {_operation(rank)}, step {rank.step}, {rank.phase}" for rank in here[:8]
        )
        return Stall(rank=here[0].rank, text=text)
    return None


def find_missed(ranks: Sequence[Standing], *, quiet_seconds: float) -> Stall | None:
    """Return a call that some ranks wait in and that another rank will not come to, if there is one."""
    for waiting in ranks:
        evaluates = waiting.phase == EVALUATION and waiting.together and not waiting.meeting
        call = waiting.meeting or (NO_GRAD_FORWARD if evaluates else "")
        if not call or waiting.idle_seconds < quiet_seconds:
            continue
        for other in ranks:
            why = _passed_by(waiting, other) if waiting.meeting else _left_alone(waiting, other)
            if why and (other.left or other.idle_seconds >= quiet_seconds):
                alone = "; where ranks run different numbers of them, use `with shardwise.evaluating(model):`"
                text = f"rank {waiting.rank} waits in {call}, which needs all ranks, and rank {other.rank} {why}: call "
                text += "it on every rank" + (alone if call == NO_GRAD_FORWARD else "")
                # The call may be the one after the loop, which a rank with fewer batches comes to first.
                text += _UNEVEN if _trains_on(waiting, other) else ""
                return Stall(rank=other.rank, text=text)
    return None


def _passed_by(waiting: Standing, other: Standing) -> str:
    """Return why `other` will not come to the meeting that `waiting` is in; "" if it may."""
    if other.meeting == waiting.meeting:
        return ""
    # In an evaluation, other groups of a mesh may be ahead and come to the meeting later.
    if other.phase != EVALUATION and (other.step, other.count) > (waiting.step, waiting.count):
        return f"has gone on to {_operation(other)} ({other.phase} of step {other.step})"
    return _ended(other)


def _trains_on(waiting: Standing, other: Standing) -> bool:
    """Return whether `other` trains, while `waiting` is between two steps."""
    return waiting.phase == BETWEEN_STEPS and other.phase in (FORWARD, BACKWARD)


def _left_alone(waiting: Standing, other: Standing) -> str:
    """Return why `other` will not come to the gather that `waiting` needs in an evaluation; "" if it may."""
    if other.position >= waiting.position:
        return ""
    return f"waits in {other.meeting}" if other.meeting else _ended(other)


def _ended(other: Standing) -> str:
    return "has ended" if other.left else "waits in torch.distributed.barrier()" if other.in_barrier else ""


def _describe(stopped: Sequence[Standing], *, why: str, where: str, waiting: Sequence[Standing]) -> Stall:
    other = waiting[0]
    text = (
        f"{_ranks(stopped)} stopped ({why}): {where}; {_ranks(waiting)} waiting in {_operation(other)}, "
        f"step {other.step}, {other.phase}"
    )
    if _trains_on(stopped[0], other):
        text += _UNEVEN
    return Stall(rank=stopped[0].rank, text=text)


def _operation(waiting: Standing) -> str:
    """Return the operation that a rank waits in, or, if only its device waits, the one after its last."""
    return waiting.waits_for or f"the operation after {waiting.last}"


def _ranks(standings: Sequence[Standing]) -> str:
    numbers = [str(standing.rank) for standing in standings]
    shown = ", ".join(numbers[:8]) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return ("rank " if len(numbers) == 1 else "ranks ") + shown
