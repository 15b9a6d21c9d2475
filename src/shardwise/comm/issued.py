"""What a group was given to do, in order: a name and a number for each collective, folded into one number.

Two all-reduces of equal size that one rank issues in another order give wrong sums on all of them, and no backend
notices. So each group keeps the collectives that were issued in it, noted down where they are handed to the backend;
ranks compare the number that they fold into (engine/guards/same_order.py), and the names only if that differs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol
from zlib import crc32

from torch import Tensor

from shardwise.comm.rank_progress import EVALUATION, PROGRESS

_MASK = 0xFFFFFFFF
# 2^32 / golden ratio: spreads neighbouring numbers, and is odd, so that nothing is lost.
_SPREAD = 0x9E3779B1


class CollectiveName:
    """What a collective is for (`reduce blocks.1`), and a number that is the same for it on all ranks."""

    __slots__ = ("number", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.number = crc32(text.encode())

    def __str__(self) -> str:
        return self.text


Issued = list[tuple[CollectiveName, int]]
"""Collectives in their order, each with the number of its buffer's elements."""

_UNNAMED = CollectiveName("a collective without a name")


class IssueLog:
    """The collectives of one group since its ranks last compared them.

    name     what the next one is for: set before it is issued
    folded   all of them, in their order, as one number
    num_compared  how many were issued before these
    """

    __slots__ = ("folded", "issued", "name", "num_compared")

    def __init__(self) -> None:
        self.name = _UNNAMED
        self.folded = 0
        self.issued: Issued = []
        self.num_compared = 0

    def note(self, buffer: Tensor | None) -> CollectiveName:
        """A collective is handed to the backend now; without a buffer, one of which ranks have different shares."""
        name, num_elements = self.name, 0 if buffer is None else buffer.numel()
        self.issued.append((name, num_elements))
        self.folded = ((self.folded ^ name.number) + num_elements) * _SPREAD & _MASK
        PROGRESS.count += 1
        return name

    def restart(self) -> None:
        """What was issued so far need not be compared (any more)."""
        self.issued.clear()
        self.folded = 0

    def mark(self) -> tuple[int, int]:
        """Where it stands now: what `forget_since` goes back to."""
        return len(self.issued), self.folded

    def forget_since(self, mark: tuple[int, int]) -> None:
        """Leave out what was issued since then: ranks of other groups may do more or less of it."""
        length, self.folded = mark
        del self.issued[length:]

    def take(self) -> Issued:
        """What was issued so far, to be compared now; from here on a new list."""
        issued, self.issued = self.issued, []
        self.folded = 0
        self.num_compared += len(issued)
        return issued


@contextmanager
def of_no_step(log: IssueLog) -> Iterator[None]:
    """What is issued in here is not compared: on a mesh with two axes, ranks that gather together may evaluate more
    often than others.
    """
    PROGRESS.phase = EVALUATION
    count, mark = PROGRESS.count, log.mark()
    yield
    log.forget_since(mark)
    PROGRESS.evaluated += PROGRESS.count - count
    PROGRESS.count = count


class HasWait(Protocol):
    """A backend's own work."""

    def wait(self) -> object: ...


class NotedWork:
    """A collective that is under way, and whose wait is seen."""

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
    """For other ranks. Of a copy: the main thread may continue meanwhile."""
    return [f"{name} of {num_elements} elements" for name, num_elements in list(issued)]


def disagreement(difference: str) -> str:
    """The line that tells of a first difference."""
    return (
        f"ranks issued different collectives in one step: {difference}; its update is not done (code that runs "
        "differently on different ranks, or a defect of the engine: please report it)"
    )


def fold_all(logs: Iterable[IssueLog]) -> int:
    """What several groups were given to do, each in its own order, as one number."""
    folded = 0
    for log in logs:
        folded = (folded ^ log.folded) * _SPREAD & _MASK
    return folded


def first_difference(issued: Mapping[int, Mapping[str, Sequence[str]]], *, ended: bool) -> str:
    """From (rank → group → names in order): the first collective in which ranks differ, and who issued what; or "".

    `ended`: no rank issues more, so that one that has issued less differs too.
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
