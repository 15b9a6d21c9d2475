"""Replays the memory of a rank row by row through a step, and finds its peak, for every batch at once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from shardwise.base.vocabulary.categories import ACTIVATIONS, CATEGORIES, GATHERED, REDUCE
from shardwise.planner.memory.stream_peak import ColumnSum, StreamPeak
from shardwise.program.spec.step import Line

_INDEX = {name: index for index, name in enumerate(CATEGORIES)}
_ACTIVATIONS, _GATHERED, _REDUCE = _INDEX[ACTIVATIONS], _INDEX[GATHERED], _INDEX[REDUCE]


@dataclass(frozen=True, slots=True)
class Change:
    """Bytes that are allocated (or freed) in a category.

    pieces   sizes of the single allocations, if there are several
    stream   stream that allocates, or has allocated what is freed; "" is the compute stream
    others   bytes of the units that a shortened model leaves out (fold.py)
    """

    category: str
    const: int
    per_sample: int = 0
    pieces: tuple[int, ...] = ()
    stream: str = ""
    others: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recategorize:
    """A buffer changes its category. `others`: buffers of the units that a shortened model leaves out."""

    before: str
    after: str
    num_bytes: int
    others: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeGrads:
    """The engine copies the gradients that autograd made for a unit, and frees them.

    kept   bytes of one of them that stays until they are taken again
    """

    unit: str
    kept: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveSaved:
    """What a unit's forward has saved leaves for host memory, or comes back."""

    unit: str
    num_bytes: Line
    to_host: bool


MemoryChange = Change | TakeGrads | Recategorize | MoveSaved


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """A row of the step: the engine's changes, and then the model's stream with its `peak`.

    `repeats`: the number of units that the unit stands for. What the stream leaves behind counts that often, but only
    after the last row of the unit in this phase: temporaries exist for one unit at a time.
    """

    label: str
    unit: str
    changes: Sequence[MemoryChange] = ()
    peak: StreamPeak | None = None
    repeats: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """A candidate for the highest point: bytes by category, and the row."""

    const: tuple[int, ...]
    per_sample: tuple[int, ...]
    label: str
    # The sum of all categories.
    line: Line
    column_sum: ColumnSum | None = None

    def total(self, batch: int) -> int:
        total = self.line.const + self.line.per_sample * batch
        return total if self.column_sum is None else total + self.column_sum.at(batch)

    def breakdown(self, batch: int) -> dict[str, int]:
        found = {
            name: const + per_sample * batch
            for name, const, per_sample in zip(CATEGORIES, self.const, self.per_sample, strict=True)
        }
        found[ACTIVATIONS] += self.column_sum.at(batch) if self.column_sum is not None else 0
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The peaks, one of which is the highest at any batch."""

    peaks: tuple[Peak, ...]

    def peak(self, batch: int) -> Peak:
        return max(self.peaks, key=lambda peak: peak.total(batch))


@dataclass(slots=True)
class _Replay:
    const: list[int]
    per_sample: list[int]
    pending: dict[str, int] = field(default_factory=dict)
    # By column sum (or None): (const, per sample, peak), none of which is below another for every batch.
    peaks: dict[ColumnSum | None, list[tuple[int, int, Peak]]] = field(default_factory=dict)

    def see(
        self, label: str, const: Sequence[int], per_sample: Sequence[int], column_sum: ColumnSum | None = None
    ) -> None:
        total, slope = sum(const), sum(per_sample)
        peaks = self.peaks.setdefault(column_sum, [])
        if any(c >= total and p >= slope for c, p, _ in peaks):
            return
        peaks[:] = [item for item in peaks if item[0] > total or item[1] > slope]
        line = Line(total, slope)
        peak = Peak(const=tuple(const), per_sample=tuple(per_sample), label=label, line=line, column_sum=column_sum)
        peaks.append((total, slope, peak))

    def run(self, row: MemoryRow) -> None:
        for change in row.changes:
            self.change(row, change)
        if row.peak is not None:
            self.flow(row, row.peak)

    def change(self, row: MemoryRow, change: MemoryChange) -> None:
        if isinstance(change, TakeGrads):
            found = self.pending.pop(change.unit, 0)
            kept = self.pending[change.unit] = min(change.kept, found)
            self.const[_REDUCE] -= found - kept
            return
        if isinstance(change, Recategorize):
            self.const[_INDEX[change.before]] -= change.num_bytes
            self.const[_INDEX[change.after]] += change.num_bytes
            return
        if isinstance(change, MoveSaved):
            factor = -1 if change.to_host else 1
            change = Change(ACTIVATIONS, factor * change.num_bytes.const, factor * change.num_bytes.per_sample)
        index = _INDEX[change.category]
        self.const[index] += change.const
        self.per_sample[index] += change.per_sample
        if change.const > 0 or change.per_sample > 0:
            self.see(row.label, self.const, self.per_sample)

    def flow(self, row: MemoryRow, peak: StreamPeak) -> None:
        for column_sum, point in (*((None, point) for point in peak.points), *peak.sums):
            const, per_sample = list(self.const), list(self.per_sample)
            _add(const, per_sample, point)
            self.see(row.label, const, per_sample, column_sum)
        _add(self.const, self.per_sample, peak.end)
        for owner, num_bytes in peak.grads:
            unit = owner or row.unit
            self.pending[unit] = self.pending.get(unit, 0) + num_bytes

    def repeat(self, phase: Iterable[MemoryRow]) -> None:
        """Add what the units leave behind that are left out of a phase.

        No peak is taken in between: the changes of such a unit belong together.
        """
        for row in phase:
            for change in row.changes:
                if isinstance(change, Change):
                    self.const[_INDEX[change.category]] += change.others
                elif isinstance(change, Recategorize):
                    self.const[_INDEX[change.before]] -= change.others
                    self.const[_INDEX[change.after]] += change.others
            if row.peak is not None:
                # Without gradients, which are among the engine's changes.
                end = [(row.repeats - 1) * size for size in row.peak.end[:4]]
                _add(self.const, self.per_sample, (end[0], end[1], end[2], end[3], 0))


def _add(const: list[int], per_sample: list[int], point: tuple[int, int, int, int, int]) -> None:
    const[_ACTIVATIONS] += point[0]
    per_sample[_ACTIVATIONS] += point[1]
    const[_GATHERED] += point[2]
    per_sample[_GATHERED] += point[3]
    const[_REDUCE] += point[4]


def replay(rows: Iterable[MemoryRow], *, at_rest: Sequence[Line]) -> Replayed:
    """Replay a step in the middle of training, starting with what is held between steps."""
    state = _Replay(const=[line.const for line in at_rest], per_sample=[line.per_sample for line in at_rest])
    for _, group in groupby(rows, key=lambda row: row.unit):
        phase = list(group)
        for row in phase:
            state.run(row)
        state.repeat(phase)
    if not state.peaks:
        # Nothing is known to be allocated in the step.
        state.see("at rest", state.const, state.per_sample)
    return Replayed(peaks=tuple(peak for found in state.peaks.values() for _, _, peak in found))


@dataclass(slots=True)
class _RowPeaks(_Replay):
    """A replay at one batch, which remembers the highest point of the current row."""

    batch: int = 1
    highest: dict[str, int] = field(default_factory=dict)

    def see(
        self, label: str, const: Sequence[int], per_sample: Sequence[int], column_sum: ColumnSum | None = None
    ) -> None:
        point = Peak(
            const=tuple(const), per_sample=tuple(per_sample), label=label, line=Line(0, 0), column_sum=column_sum
        )
        found = point.breakdown(self.batch)
        if sum(found.values()) > sum(self.highest.values()):
            self.highest = found


def row_peaks(rows: Iterable[MemoryRow], *, at_rest: Sequence[Line], batch: int) -> list[tuple[str, dict[str, int]]]:
    """Return the highest point of each row of a step at one batch, by category. The model must not be shortened."""
    state = _RowPeaks(
        const=[line.const for line in at_rest], per_sample=[line.per_sample for line in at_rest], batch=batch
    )
    found = []
    for row in rows:
        state.highest = {}
        state.see(row.label, state.const, state.per_sample)
        state.run(row)
        found.append((row.label, state.highest))
    return found
