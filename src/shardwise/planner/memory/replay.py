"""What a rank holds, row by row of a step, and the highest that it comes to: for every batch at once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from shardwise.planner.memory.column_sum import ColumnSum
from shardwise.planner.memory.stream_peak import StreamPeak
from shardwise.spec.law import Line
from shardwise.vocabulary.categories import ACTIVATIONS, CATEGORIES, GATHERED, REDUCE

_INDEX = {name: index for index, name in enumerate(CATEGORIES)}
_ACTIVATIONS, _GATHERED, _REDUCE = _INDEX[ACTIVATIONS], _INDEX[GATHERED], _INDEX[REDUCE]


@dataclass(frozen=True, slots=True)
class Change:
    """Bytes that come (or go) in a category.

    pieces      the sizes of the single allocations, where there are several
    stream      the stream whose memory it is; "" is the one that computes
    is_left_out of units that a shortened model leaves out
    """

    category: str
    const: int
    per_sample: int = 0
    pieces: tuple[int, ...] = ()
    stream: str = ""
    is_left_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recategorize:
    """A buffer is from now on in another category."""

    before: str
    after: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeGrads:
    """The engine takes the gradients that autograd made for a unit; they are freed."""

    unit: str


MemoryChange = Change | TakeGrads | Recategorize


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """A row of the step: what the engine does then, and what the model does after it, up to which `peak`.

    `repeats`: what is left behind counts as often, once all rows of the unit in this phase are over: what its backward
    brings is there for one unit at a time.
    """

    label: str
    unit: str
    changes: Sequence[MemoryChange] = ()
    peak: StreamPeak | None = None
    repeats: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """A candidate for the highest point: by category, and where."""

    const: tuple[int, ...]
    per_sample: tuple[int, ...]
    label: str
    # Of all categories together.
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
    """The peaks of which one is the highest at any batch; the highest of each row; what is held at rest."""

    peaks: tuple[Peak, ...]
    timeline: tuple[tuple[str, Line], ...]
    at_rest: tuple[Line, ...]

    def peak(self, batch: int) -> Peak:
        return max(self.peaks, key=lambda peak: peak.total(batch))


@dataclass(slots=True)
class _Replay:
    const: list[int]
    per_sample: list[int]
    pending: dict[str, int] = field(default_factory=dict)
    # (const, per sample, peak) with the same sum on top, or none, of which none is below another for every batch.
    peaks: dict[ColumnSum | None, list[tuple[int, int, Peak]]] = field(default_factory=dict)
    row_peak: tuple[int, int] = (0, 0)

    def see(
        self, label: str, const: Sequence[int], per_sample: Sequence[int], column_sum: ColumnSum | None = None
    ) -> None:
        total, slope = sum(const), sum(per_sample)
        if total > self.row_peak[0] or slope > self.row_peak[1]:
            self.row_peak = (max(total, self.row_peak[0]), max(slope, self.row_peak[1]))
        peaks = self.peaks.setdefault(column_sum, [])
        if any(c >= total and p >= slope for c, p, _ in peaks):
            return
        peaks[:] = [item for item in peaks if item[0] > total or item[1] > slope]
        line = Line(total, slope)
        peak = Peak(const=tuple(const), per_sample=tuple(per_sample), label=label, line=line, column_sum=column_sum)
        peaks.append((total, slope, peak))

    def change(self, row: MemoryRow, change: MemoryChange) -> None:
        if isinstance(change, TakeGrads):
            self.const[_REDUCE] -= self.pending.pop(change.unit, 0)
            return
        if isinstance(change, Recategorize):
            self.const[_INDEX[change.before]] -= change.num_bytes
            self.const[_INDEX[change.after]] += change.num_bytes
            return
        index = _INDEX[change.category]
        self.const[index] += change.const
        self.per_sample[index] += change.per_sample
        if change.const > 0 or change.per_sample > 0:
            self.see(row.label, self.const, self.per_sample)

    def flow(self, row: MemoryRow, peak: StreamPeak) -> None:
        for point in peak.points:
            const, per_sample = list(self.const), list(self.per_sample)
            _add(const, per_sample, point)
            self.see(row.label, const, per_sample)
        for column_sum, point in peak.sums:
            const, per_sample = list(self.const), list(self.per_sample)
            _add(const, per_sample, point)
            self.see(row.label, const, per_sample, column_sum)
        _add(self.const, self.per_sample, peak.end)
        for owner, num_bytes in peak.grads:
            unit = owner or row.unit
            self.pending[unit] = self.pending.get(unit, 0) + num_bytes

    def follow(self, left_out: Iterable[Change | tuple[StreamPeak, int]]) -> None:
        """The units that are left out come after the one that stands for them: what they leave behind.

        No peak is taken in between: what each brings and what it takes away belong together.
        """
        for one in left_out:
            if isinstance(one, Change):
                self.const[_INDEX[one.category]] += one.const
                self.per_sample[_INDEX[one.category]] += one.per_sample
                continue
            # Of activations; gradients are the engine's business.
            peak, times = one
            self.const[_ACTIVATIONS] += times * peak.end[0]
            self.per_sample[_ACTIVATIONS] += times * peak.end[1]
            self.const[_GATHERED] += times * peak.end[2]
            self.per_sample[_GATHERED] += times * peak.end[3]


def _add(const: list[int], per_sample: list[int], point: tuple[int, int, int, int, int]) -> None:
    const[_ACTIVATIONS] += point[0]
    per_sample[_ACTIVATIONS] += point[1]
    const[_GATHERED] += point[2]
    per_sample[_GATHERED] += point[3]
    const[_REDUCE] += point[4]


def replay(rows: Iterable[MemoryRow], *, at_rest: Sequence[Line]) -> Replayed:
    """Go through a step that follows on a step, from what is held between steps."""
    state = _Replay(const=[line.const for line in at_rest], per_sample=[line.per_sample for line in at_rest])
    timeline = []
    for _, phase in groupby(rows, key=lambda row: row.unit):
        left_out: list[Change | tuple[StreamPeak, int]] = []
        for row in phase:
            state.row_peak = (sum(state.const), sum(state.per_sample))
            for change in row.changes:
                if isinstance(change, Change) and change.is_left_out:
                    left_out.append(change)
                else:
                    state.change(row, change)
            if row.peak is not None:
                state.flow(row, row.peak)
                left_out.append((row.peak, row.repeats - 1))
            timeline.append((row.label, Line(*state.row_peak)))
        state.follow(left_out)
    if not state.peaks:
        # Nothing is known to come on top.
        state.see("at rest", state.const, state.per_sample)
    peaks = tuple(peak for found in state.peaks.values() for _, _, peak in found)
    return Replayed(peaks=peaks, timeline=tuple(timeline), at_rest=tuple(at_rest))


@dataclass(slots=True)
class _RowPeaks(_Replay):
    """A replay at one batch, which remembers the highest point of the row that it is in."""

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
    """The highest point of each row of a step at one batch, by category."""
    state = _RowPeaks(
        const=[line.const for line in at_rest], per_sample=[line.per_sample for line in at_rest], batch=batch
    )
    found = []
    for row in rows:
        state.highest = {}
        state.see(row.label, state.const, state.per_sample)
        for change in row.changes:
            state.change(row, change)
        if row.peak is not None:
            state.flow(row, row.peak)
        found.append((row.label, state.highest))
    return found
