"""The result of one case of a bench, as values and as JSON. No torch here."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardwise.base.vocabulary.categories import CATEGORIES
from shardwise.base.vocabulary.span import Span, busy_seconds, exposed_gaps
from shardwise.measure.bench.modes import is_ours, mode_of
from shardwise.measure.bench.spread import Spread
from shardwise.measure.bench.tape_spans import Happening, recorded_spans
from shardwise.measure.profile.memory_ledger import MemoryLedger
from shardwise.program.spec import UnitSpec

NOT_MEASURED = "not measured"
NOT_MEASURABLE = "not measurable here"
"""Shown for exposed communication that is smaller than the spread of the two times it is computed from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitOutline:
    """A unit of the model, in the order of the spec."""

    name: str
    num_params: int
    num_trained: int

    @classmethod
    def of(cls, unit: UnitSpec) -> "UnitOutline":
        trained = sum(param.num_elements for param in unit.params if param.trainable)
        return cls(name=unit.name, num_params=unit.num_params, num_trained=trained)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedCase:
    """The planner's prediction for the same case; times are None if it has none."""

    allocated_bytes: int
    breakdown_bytes: Mapping[str, int]
    # The peak of each row, (label, category → bytes), to compare with the ledger.
    entries: tuple[tuple[str, Mapping[str, int]], ...]
    step_seconds: float | None = None
    exposed_seconds: float | None = None
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """The result of one engine and strategy. If it did not run, `why_not` says why, and the rest is empty.

    losses             of every step, averaged over ranks
    grad_norms         of the full gradient in the first steps, before clipping
    param_norms        of the gradient of each parameter in the first step
    dtypes             "compute" (of matrix products), "master", "grads", "optim" → observed dtypes
    step_seconds       per step, for each block of steps in all runs
    silent_seconds     the same without communication (collectives return at once); `why_not_silent`, if that failed
    first_step_seconds from the start of the processes to the end of their first step
    allocated_bytes    the peak of a step, per rank; reserved_bytes: of the caching allocator, on a GPU
    ledgers            of one step, per rank; raised to the peak: `measured_ledger`
    sent_bytes         sent by a rank in one step; `calls`: collective → how often
    tape               the operations of one step of rank 0; tape_seconds: how long that step took
    buckets            name → units, as rank 0 reduces them
    """

    engine: str
    strategy: str
    why_not: str = ""
    losses: tuple[float, ...] = ()
    grad_norms: tuple[float, ...] = ()
    param_norms: Mapping[str, float] = field(default_factory=dict)
    dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    step_seconds: Spread | None = None
    silent_seconds: Spread | None = None
    why_not_silent: str = ""
    first_step_seconds: Spread | None = None
    allocated_bytes: tuple[int, ...] = ()
    reserved_bytes: tuple[int, ...] = ()
    ledgers: tuple[MemoryLedger, ...] = ()
    sent_bytes: int | None = None
    calls: Mapping[str, int] = field(default_factory=dict)
    units: tuple[UnitOutline, ...] = ()
    buckets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tape: tuple[Happening, ...] = ()
    tape_seconds: float | None = None
    predicted: PredictedCase | None = None

    @property
    def name(self) -> str:
        return self.strategy if is_ours(self.engine) else f"{self.engine} {self.strategy}"

    @property
    def mode(self) -> str:
        """The way its steps ran: eager, captured or compiled."""
        return mode_of(self.engine)

    @property
    def ran(self) -> bool:
        return self.step_seconds is not None

    @property
    def seconds(self) -> float:
        """The median step time of a case that ran."""
        assert self.step_seconds is not None
        return self.step_seconds.median

    @property
    def peak_bytes(self) -> int:
        """The peak of the rank with the highest one, as the device counted it in the timed steps."""
        return max(self.allocated_bytes)

    @property
    def peak_rank(self) -> int:
        """The rank with the highest peak; 0 if no peak is known."""
        return self.allocated_bytes.index(self.peak_bytes) if self.allocated_bytes else 0

    def measured_ledger(self, rank: int) -> MemoryLedger | None:
        """Return a rank's ledger, raised to the rank's peak (MemoryLedger.adding_up_to); None if it has none, or if the
        recorded step held more than the timed ones, so that it was not the same step.
        """
        if rank >= len(self.ledgers):
            return None
        ledger = self.ledgers[rank]
        peak_bytes = self.allocated_bytes[rank] if rank < len(self.allocated_bytes) else ledger.peak.total_bytes
        return ledger.adding_up_to(peak_bytes) if peak_bytes >= ledger.peak.total_bytes else None

    def peak_parts(self) -> Mapping[str, int] | None:
        """Return category → bytes at the peak, which add up to `peak_bytes`; None if no step was recorded."""
        ledger = self.measured_ledger(self.peak_rank)
        return None if ledger is None else {name: ledger.peak.num_bytes.get(name, 0) for name in CATEGORIES}

    @property
    def tape_scale(self) -> float:
        """The median step time relative to the taped step, whose length is at least that of its operations."""
        length = max(self.tape_seconds or 0.0, *(one.seconds for one in self.tape)) if self.tape else 0.0
        return self.seconds / length if self.ran and length else 1.0

    @property
    def scaled_tape(self) -> tuple[Happening, ...]:
        """The tape with times as in a step of median length, so that all pictures of a step are as long as it."""
        scale = self.tape_scale
        return tuple(replace(one, seconds=one.seconds * scale) for one in self.tape)

    @property
    def spans(self) -> list[Span]:
        """The timeline of rank 0: the scaled tape as spans, which end with the step."""
        return recorded_spans(self.scaled_tape, end=self.seconds if self.ran else None)

    @property
    def exposed_spans(self) -> list[Span]:
        """The times of the timeline in which nothing is computed while something is being sent.

        None on a GPU: there the tape says when operations were issued, not when they ran.
        """
        return [] if self.reserved_bytes else list(exposed_gaps(self.spans))

    @property
    def is_exposed_by_timeline(self) -> bool:
        """Return whether exposed communication is the timeline's: one was taped, on CPUs, and something was sent."""
        return not self.reserved_bytes and any(span.queue != "compute" for span in self.spans)

    @property
    def exposed_seconds(self) -> float | None:
        """Exposed communication of the timeline; without one, what a step takes longer than without communication.

        None if `why_not_exposed` says why.
        """
        if self.why_not_exposed:
            return None
        if self.is_exposed_by_timeline:
            return busy_seconds(self.exposed_spans)
        assert self.silent_seconds is not None
        return self.seconds - self.silent_seconds.median

    @property
    def why_not_exposed(self) -> str:
        """Not measured, or lost in noise: the difference is negative, or smaller than the spread of the two times."""
        if self.step_seconds is not None and self.is_exposed_by_timeline:
            return ""
        if self.step_seconds is None or self.silent_seconds is None:
            return NOT_MEASURED
        is_longer = self.step_seconds.median > self.silent_seconds.median
        is_clear = is_longer and not self.step_seconds.overlaps(self.silent_seconds)
        return "" if is_clear else NOT_MEASURABLE

    @property
    def memory_error(self) -> float | None:
        """Predicted minus measured, relative to measured."""
        if self.predicted is None or not self.allocated_bytes:
            return None
        return self.predicted.allocated_bytes / self.peak_bytes - 1

    @property
    def time_error(self) -> float | None:
        if self.predicted is None or self.predicted.step_seconds is None or not self.ran:
            return None
        return self.predicted.step_seconds / self.seconds - 1

    def to_data(self) -> dict[str, Any]:
        """Return JSON types, with exposed communication as the table and the page show it."""
        return {
            **asdict(self),
            "ledgers": [ledger.to_data() for ledger in self.ledgers],
            "tape": [list(asdict(happening).values()) for happening in self.tape],
            "exposed_seconds": self.exposed_seconds,
            "why_not_exposed": self.why_not_exposed,
        }
