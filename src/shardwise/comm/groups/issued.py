"""The log of the collectives issued in a group, in order, folded into one number.

If one rank swaps two all-reduces of equal size, all ranks get wrong sums, and no backend notices. So each group logs
its collectives where they are handed to the backend. Ranks compare the number that the log folds into
(engine/guards/same_order.py), and the names only if the numbers differ.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol
from zlib import crc32

from torch import Tensor

from shardwise.comm.groups.rank_progress import EVALUATION, PROGRESS

_MASK = 0xFFFFFFFF
# 2^32 / golden ratio: spreads neighbouring numbers, and is odd, so that multiplying by it loses nothing.
_SPREAD = 0x9E3779B1


class CollectiveName:
    """The name of a collective (`reduce blocks.1`), and a number for it that is the same on all ranks."""

    __slots__ = ("number", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.number = crc32(text.encode())

    def __str__(self) -> str:
        return self.text


Issued = list[tuple[CollectiveName, int]]
"""Collectives in order, each with the number of elements of its buffer."""

_UNNAMED = CollectiveName("a collective without a name")


class IssueLog:
    """The collectives issued in one group since its ranks last compared them.

    name           the name of the next one, set before it is issued
    folded         all of them, in order, as one number
    num_compared   how many were compared before these
    """

    __slots__ = ("folded", "issued", "name", "num_compared")

    def __init__(self) -> None:
        self.name = _UNNAMED
        self.folded = 0
        self.issued: Issued = []
        self.num_compared = 0

    def note(self, buffer: Tensor | None) -> CollectiveName:
        """Log a collective as it is handed to the backend. `buffer` is None if its size differs between ranks."""
        name, num_elements = self.name, 0 if buffer is None else buffer.numel()
        self.issued.append((name, num_elements))
        self.folded = ((self.folded ^ name.number) + num_elements) * _SPREAD & _MASK
        PROGRESS.count += 1
        return name

    def restart(self) -> None:
        """Forget what was issued so far without comparing it."""
        self.issued.clear()
        self.folded = 0

    def mark(self) -> tuple[int, int]:
        """Return the current state, for `forget_since`."""
        return len(self.issued), self.folded

    def forget_since(self, mark: tuple[int, int]) -> None:
        """Forget what was issued since `mark`: ranks of other groups may issue more or less of it."""
        length, self.folded = mark
        del self.issued[length:]

    def take(self) -> Issued:
        """Return what was issued so far, to be compared now, and start a new list."""
        issued, self.issued = self.issued, []
        self.folded = 0
        self.num_compared += len(issued)
        return issued


@contextmanager
def of_no_step(log: IssueLog) -> Iterator[None]:
    """Leave the collectives in this block out of the comparison: on a mesh with two axes, groups may evaluate a
    different number of times.
    """
    PROGRESS.phase = EVALUATION
    count, mark = PROGRESS.count, log.mark()
    yield
    log.forget_since(mark)
    PROGRESS.evaluated += PROGRESS.count - count
    PROGRESS.count = count


class HasWait(Protocol):
    """The work of a backend."""

    def wait(self) -> object: ...


class NotedWork:
    """A collective that was issued; while it is waited for, PROGRESS says so."""

    __slots__ = ("_name", "_work")

    def __init__(self, work: HasWait, name: CollectiveName) -> None:
        self._work = work
        self._name = name

    def wait(self) -> None:
        PROGRESS.waits_for = self._name.text
        try:
            self._work.wait()
        except RuntimeError as error:
            PROGRESS.lose(error)
            if PROGRESS.explain is not None:
                PROGRESS.explain(error)
            raise
        finally:
            PROGRESS.waits_for = ""


def names_of(issued: Issued) -> list[str]:
    """Describe the collectives for other ranks, from a copy, since the main thread may add to the list."""
    return [f"{name} of {num_elements} elements" for name, num_elements in list(issued)]


def disagreement(difference: str) -> str:
    """Return the error message for the first difference."""
    return (
        f"ranks issued different collectives in one step: {difference}; its update is not done (code that runs "
        "differently on different ranks; two models in one backward, which must be prepared at once; or a defect of "
        "the engine: please report it)"
    )


def fold_all(logs: Iterable[IssueLog]) -> int:
    """Fold the logs of several groups into one number."""
    folded = 0
    for log in logs:
        folded = (folded ^ log.folded) * _SPREAD & _MASK
    return folded


def first_difference(issued: Mapping[int, Mapping[str, Sequence[str]]], *, ended: bool) -> str:
    """Describe the first collective in which ranks differ, or return "". `issued` maps rank → group → names in order.

    `ended`: no rank will issue more, so one that has issued fewer differs too.
    """
    first, *others = sorted(issued)
    for group in issued[first]:
        for rank in others:
            ours, theirs = issued[first][group], issued[rank].get(group, ())
            length = min(len(ours), len(theirs))
            place = next((index for index in range(length) if ours[index] != theirs[index]), length)
            if place == length and (not ended or len(ours) == len(theirs)):
                continue
            one, other = (names[place] if place < len(names) else "nothing more" for names in (ours, theirs))
            return f"as number {place + 1} of the {group} group, rank {first} issued {one}, rank {rank} {other}"
    return ""
