"""The memory ledger: live bytes by category, row by row of a step. No torch here.

    allocations   when each storage was allocated and freed (cpu_allocations.py, cuda_allocations.py)
    marks         the rows of the step, each with the storages whose category the engine knows then (step_rows.py)
    ledger        the live bytes by category at the peak of each row, and after each operation of a tape

A storage has the category that the engine last gave it, or, before that, the first one that it will give it: a gradient
counts as such from its allocation on, though the engine sees it only when its unit's gradients are complete. A storage
that the engine never knows is an activation if it was allocated in forward or backward, and `other` if it was allocated
in the update, before the step, or as the scratch memory of a kernel.
"""

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Any

from shardwise.base.vocabulary.allocation import FOREVER, Allocation
from shardwise.base.vocabulary.categories import ACTIVATIONS, CATEGORIES, OTHER


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerMark:
    """The beginning of a row of the step: its label, the moment, and address → category of what the engine holds.

    `computes`: a storage allocated in this row that the engine does not know is an activation.
    `reserved_bytes`: what the caching allocator holds.
    """

    label: str
    moment: int
    known: Mapping[int, str]
    computes: bool = True
    reserved_bytes: int | None = None


class Lasts(Enum):
    """The duration of an operation, relative to the moment at which it is taped."""

    NOT = "it is done"
    UNTIL_NEXT = "it begins, and lasts until the next operation"
    SINCE_LAST = "it ends, and has lasted since the operation before"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationMark:
    """An operation of the tape: its label, and when it was taped."""

    label: str
    moment: int
    lasts: Lasts


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """Bytes by category at the peak of a row, and what the caching allocator held when the row began."""

    at: str
    num_bytes: Mapping[str, int]
    reserved_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        return sum(self.num_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """The memory of a step, row by row, and what is live after it.

    operations    what is live after each operation of the tape; for one that lasts, at its peak
    """

    entries: tuple[LedgerEntry, ...]
    at_rest: LedgerEntry
    operations: tuple[LedgerEntry, ...] = ()

    @property
    def peak(self) -> LedgerEntry:
        """The entry with the most bytes; the first of several."""
        return max(self.entries, key=lambda entry: entry.total_bytes)

    def adding_up_to(self, peak_bytes: int) -> "MemoryLedger":
        """Return the ledger with its peak raised to `peak_bytes`: what the recording did not see counts as `other`.

        That is memory allocated before it (workspaces of libraries) and the allocator's rounding, both permanent.
        """
        unseen_bytes = peak_bytes - self.peak.total_bytes
        if unseen_bytes <= 0:
            return self

        def raised(entry: LedgerEntry) -> LedgerEntry:
            other = entry.num_bytes.get(OTHER, 0) + unseen_bytes
            return replace(entry, num_bytes={**entry.num_bytes, OTHER: other})

        return MemoryLedger(
            entries=tuple(map(raised, self.entries)),
            at_rest=raised(self.at_rest),
            operations=tuple(map(raised, self.operations)),
        )

    def to_data(self) -> dict[str, Any]:
        return {
            "entries": [[entry.at, dict(entry.num_bytes), entry.reserved_bytes] for entry in self.entries],
            "at_rest": dict(self.at_rest.num_bytes),
            "operations": [[entry.at, dict(entry.num_bytes)] for entry in self.operations],
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "MemoryLedger":
        entries = [LedgerEntry(at=at, num_bytes=parts, reserved_bytes=held) for at, parts, held in data["entries"]]
        return cls(
            entries=tuple(entries),
            at_rest=LedgerEntry(at="at rest", num_bytes=data["at_rest"]),
            operations=tuple(LedgerEntry(at=at, num_bytes=parts) for at, parts in data.get("operations", ())),
        )


def ledger_of(
    allocations: Iterable[Allocation],
    *,
    marks: Sequence[LedgerMark],
    end: int,
    operations: Sequence[OperationMark] = (),
) -> MemoryLedger:
    """Return the ledger of the step whose rows begin at `marks`, in order, and which ends at `end`."""
    starts = [mark.moment for mark in marks]
    changes = [change for one in allocations for change in _changes(one, marks=marks, starts=starts)]
    changes.sort(key=lambda change: change[0])
    *by_row, at_rest = _highest(changes, spans=[*pairwise([*starts, end]), (end, end)])
    by_operation = _highest(changes, spans=_spans(operations, starts=starts, end=end))
    return MemoryLedger(
        entries=tuple(
            LedgerEntry(at=mark.label, num_bytes=parts, reserved_bytes=mark.reserved_bytes)
            for mark, parts in zip(marks, by_row, strict=True)
        ),
        at_rest=LedgerEntry(at="at rest", num_bytes=at_rest),
        operations=tuple(
            LedgerEntry(at=operation.label, num_bytes=parts)
            for operation, parts in zip(operations, by_operation, strict=True)
        ),
    )


def _spans(operations: Sequence[OperationMark], *, starts: Sequence[int], end: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of each operation. One that lasts until the next ends where the next one's row begins, since
    that row may allocate before its operation is taped.
    """
    moments = [operation.moment for operation in operations]
    for operation, before, after in zip(operations, [*moments[:1], *moments], [*moments[1:], end], strict=False):
        moment = operation.moment
        match operation.lasts:
            case Lasts.NOT:
                yield moment, moment
            case Lasts.UNTIL_NEXT:
                row_start = starts[bisect_right(starts, after) - 1]
                yield moment, row_start if row_start > moment else after
            case Lasts.SINCE_LAST:
                yield before, moment


def _highest(changes: Sequence[tuple[int, str, int]], *, spans: Iterable[tuple[int, int]]) -> Iterator[dict[str, int]]:
    """Yield what is live at the peak of each span, end excluded; spans are in order."""
    live = dict.fromkeys(CATEGORIES, 0)
    position = 0

    def advance(until: int) -> Iterator[dict[str, int]]:
        """Yield what is live after each change before a moment."""
        nonlocal position
        while position < len(changes) and changes[position][0] < until:
            _, category, num_bytes = changes[position]
            live[category] += num_bytes
            position += 1
            yield live

    for start, end in spans:
        for _ in advance(start):
            pass
        highest = dict(live)
        for now in advance(end):
            if sum(now.values()) > sum(highest.values()):
                highest = dict(now)
        yield highest


def paired(
    seen: Sequence[LedgerEntry], expected: Iterable[LedgerEntry]
) -> Iterator[tuple[LedgerEntry, LedgerEntry | None]]:
    """Yield (measured, predicted) for each measured row.

    Predicted rows that were not measured (step_rows.py) count with the row before them, by their highest peak.
    """
    waiting = deque(expected)
    later = Counter(entry.at for entry in seen)
    for entry in seen:
        later[entry.at] -= 1
        found = [waiting.popleft()] if waiting and waiting[0].at == entry.at else []
        while waiting and not later[waiting[0].at]:
            found.append(waiting.popleft())
        yield entry, max(found, key=lambda one: one.total_bytes, default=None)


def _changes(
    allocation: Allocation, *, marks: Sequence[LedgerMark], starts: Sequence[int]
) -> Iterator[tuple[int, str, int]]:
    """Yield (moment, category, change in bytes) for one storage."""
    lived_through = range(bisect_left(starts, allocation.born), bisect_left(starts, allocation.freed))
    given = [(starts[row], marks[row].known.get(allocation.address)) for row in lived_through]
    named = [(moment, category) for moment, category in given if category is not None]
    before = named[0][1] if named else _unnamed(allocation, marks=marks, starts=starts)
    yield allocation.born, before, allocation.num_bytes
    for moment, category in named[1:]:
        if category != before:
            yield moment, before, -allocation.num_bytes
            yield moment, category, allocation.num_bytes
            before = category
    if allocation.freed != FOREVER:
        yield allocation.freed, before, -allocation.num_bytes


def _unnamed(allocation: Allocation, *, marks: Sequence[LedgerMark], starts: Sequence[int]) -> str:
    """Return the category of a storage that the engine does not know."""
    row = bisect_left(starts, allocation.born) - 1
    computes = row >= 0 and marks[row].computes
    return ACTIVATIONS if computes and not allocation.is_scratch else OTHER
