"""The trace of one training step on one device: every allocation, every release and every operation.

A step is a list of rows. A row is a trigger of the step program that happens to a unit (its forward begins, its
gradients are ready …), and the stream of events and operations up to the next row. Strategies are not part of a trace:
the planner overlays them.

Laws: a number of bytes, operations or elements as a function of the batch and of the length of a sample.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple


class Line(NamedTuple):
    """const + per_sample · batch, at a given length of sample.

    A tuple, because a plan makes millions, and they are keys.
    """

    const: int
    per_sample: int

    def at(self, batch: int) -> int:
        return self.const + self.per_sample * batch


@dataclass(frozen=True, slots=True)
class Law:
    """c₀ + c₁·s + c₂·s² + batch · (b₀ + b₁·s + b₂·s²), where s is the length of a sample.

    If only one length was traced, only c₀ and b₀ are nonzero.
    """

    terms: tuple[int, int, int, int, int, int]

    def line(self, seq: int | None = None) -> Line:
        """Return the law at one length; None for models whose samples have no length."""
        c0, c1, c2, b0, b1, b2 = self.terms
        if seq is None:
            return Line(c0, b0)
        return Line(c0 + (c1 + c2 * seq) * seq, b0 + (b1 + b2 * seq) * seq)

    def at(self, *, batch: int, seq: int | None = None) -> int:
        return self.line(seq).at(batch)


def fit(values: Mapping[tuple[int, int], int]) -> Law | None:
    """Return the law through values at (batch, length), for two batches and one length or three; None if none passes.

    Further points are checked, not fitted. Coefficients must be integers, because bytes and operations are counted, and
    the value at batch 0 must not be negative, as it would be for a number that grows with the square of the batch.
    """
    return _fit(tuple(values.items()))


@lru_cache(maxsize=4096)
def _fit(items: tuple[tuple[tuple[int, int], int], ...]) -> Law | None:
    values = dict(items)
    batches = list(dict.fromkeys(batch for batch, _ in values))
    lengths = list(dict.fromkeys(length for _, length in values))
    curves = {}
    for batch in batches[:2]:
        points = [(length, values[batch, length]) for length in lengths[:3] if (batch, length) in values]
        curves[batch] = _parabola(points)
    first, second = batches[:2]
    slopes = [(high - low) / (second - first) for low, high in zip(curves[first], curves[second], strict=True)]
    consts = [low - slope * first for low, slope in zip(curves[first], slopes, strict=True)]
    terms = [*consts, *slopes]
    if any(term.denominator != 1 for term in terms):
        return None
    c0, c1, c2, b0, b1, b2 = (int(term) for term in terms)
    law = Law((c0, c1, c2, b0, b1, b2))
    fits = all(law.at(batch=batch, seq=length) == value for (batch, length), value in values.items())
    return law if fits and all(law.line(length).const >= 0 for length in lengths) else None


def _parabola(points: Sequence[tuple[int, int]]) -> list[Fraction]:
    """Return the coefficients of the polynomial through one point or three."""
    if len(points) == 1:
        return [Fraction(points[0][1]), Fraction(0), Fraction(0)]
    (x0, y0), (x1, y1), (x2, y2) = points
    slope01, slope12 = Fraction(y1 - y0, x1 - x0), Fraction(y2 - y1, x2 - x1)
    square = (slope12 - slope01) / (x2 - x0)
    linear = slope01 - square * (x0 + x1)
    return [y0 - linear * x0 - square * x0 * x0, linear, square]


BEFORE_FORWARD = "before forward"
AFTER_FORWARD = "after forward"
BEFORE_BACKWARD = "before backward"
GRADS_READY = "grads ready"
BACKWARD_DONE = "backward done"
FORWARD = (BEFORE_FORWARD, AFTER_FORWARD)
# After these come operations of the unit itself: also after its last gradient, up to that of its input.
IN_UNIT = (BEFORE_FORWARD, BEFORE_BACKWARD, GRADS_READY)

GATHERED, TENSORWISE, ROWWISE = "fp8-gathered", "fp8-tensorwise", "fp8-rowwise"
FP8_WAYS = (GATHERED, TENSORWISE, ROWWISE)
"""StepTrace.computes_in where linear layers multiply in fp8: weights gathered so, or cast by each layer."""

COMPILED = {"none": "compiled", "full": "compiled-full"}
"""Recompute → the value of StepTrace.recompute if all units but the root are compiled by inductor."""


class Act(Enum):
    """An event in the life of a storage."""

    BORN = "+"
    DIED = "-"
    # The gradient is in `parameter.grad`; from there on the engine decides when it is freed.
    ACCUMULATED = "="


class What(Enum):
    """The content of a storage."""

    ACTIVATION = "a"
    GRADIENT = "g"
    # A parameter in another dtype, made by autocast.
    WEIGHT_COPY = "w"
    # Allocated and freed within one operation.
    SCRATCH = "s"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageEvent:
    """The allocation or release of one storage.

    ordinal   number of the allocation within its unit and step; None if another unit allocated it, unless `owner` does
    owner     unit of the parameter that a gradient belongs to, or that allocated what is released; "" for the row's own
    each_of   second unit of a run: every unit between the ends of the run releases such a storage
    columns   scratch of a sum into this many columns (planner/memory/stream_peak.py); `num_bytes` then counts its rows
    """

    act: Act
    what: What
    num_bytes: Law
    ordinal: int | None = None
    owner: str = ""
    each_of: str = ""
    columns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An operation that computes. `num_flops` of causal attention counts only the half that is computed.

    `dims` of a matrix product: (m, n, k), preceded by their number if batched; of attention: (batch · heads, queries,
    keys, width of a head); of an elementwise operation whose operands differ in layout: (elements of the result).
    """

    name: str
    num_flops: Law
    num_bytes: Law
    dims: tuple[Law, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The events and operations between two rows, in order."""

    events: tuple[StorageEvent, ...] = ()
    ops: tuple[Op, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """`trigger` happens to `unit` in its `call`-th call; then the stream follows."""

    trigger: str
    unit: str
    call: int = 0
    stream: Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Equal units, called one after another, of which only the first, second, third and last were traced.

    The second and third have equal traces, which therefore hold for all units between the first and the last.
    """

    units: tuple[str, ...]

    @property
    def traced(self) -> tuple[str, str, str, str]:
        return (*self.units[:3], self.units[-1])  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """A step in one way of computing (`fp32`, `bf16`, `autocast`, GATHERED …) and of recomputing; a run of equal units
    once.

    `recompute` also says whether units are compiled (COMPILED). Such a trace has no operations: the time of compiled
    units is predicted from the operations of the uncompiled trace.
    """

    computes_in: str
    recompute: str
    rows: tuple[StepRow, ...]
    runs: tuple[Run, ...] = ()

    def expand(
        self, chosen: Mapping[Run, Sequence[str]] | None = None, *, num_units: Mapping[Run, int] | None = None
    ) -> Iterator[StepRow]:
        """Yield the rows of all units; of a run, only those of its `chosen` units, which include its ends.

        `num_units`: how many units the chosen ones of a run stand for (default: themselves).
        """
        chosen, num_units = chosen or {}, num_units or {}
        middles = {run.traced[1]: list(chosen.get(run, run.units))[1:-1] for run in self.runs}
        counts = {run.traced[1]: num_units.get(run, len(middles[run.traced[1]]) + 2) - 2 for run in self.runs}
        repeated = {run.traced[2] for run in self.runs}
        rows = (_multiplied(row, counts) for row in self.rows)
        for (unit, is_forward), phase in groupby(rows, key=lambda row: (row.unit, row.trigger in FORWARD)):
            if unit in repeated:
                continue
            names, group = middles.get(unit, [unit]), list(phase)
            for name in names if is_forward else reversed(names):
                yield from (replace(row, unit=name) if row.unit != name else row for row in group)


def _multiplied(row: StepRow, counts: Mapping[str, int]) -> StepRow:
    """Repeat each release that stands for several units."""
    if not any(event.each_of for event in row.stream.events):
        return row
    events = tuple(event for event in row.stream.events for _ in range(counts.get(event.each_of, 1)))
    return replace(row, stream=replace(row.stream, events=events))
