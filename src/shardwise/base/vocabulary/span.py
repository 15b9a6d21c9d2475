"""A span of a step's timeline: one queue works on one operation, from a start to an end.

The planner predicts spans, a recorded tape gives them, and the report draws them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

QUEUES: Final = ("compute", "gather", "reduce")
"""The queues of a device: its computations, and the two streams of its collectives."""


class Span(NamedTuple):
    """`queue` (one of QUEUES) was busy with `name` from `start` to `end`, in seconds since the step began."""

    queue: str
    name: str
    start: float
    end: float


def exposed_gaps(spans: Sequence[Span]) -> Iterator[Span]:
    """Yield the times in which nothing is computed while something is being sent."""
    busy = sorted((span.start, span.end) for span in spans if span.queue == "compute")
    for start, end in _union(sorted((span.start, span.end) for span in spans if span.queue != "compute")):
        at = start
        for compute_start, compute_end in busy:
            if compute_end <= at:
                continue
            if compute_start >= end:
                break
            if compute_start > at:
                yield Span("compute", "exposed communication", at, compute_start)
            at = compute_end
        if at < end:
            yield Span("compute", "exposed communication", at, end)


def busy_seconds(spans: Iterable[Span]) -> float:
    """Return how long at least one of the spans lasts: those that overlap count once."""
    return sum(end - start for start, end in _union(sorted((span.start, span.end) for span in spans)))


def _union(intervals: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield intervals, given in order of their start, without their overlaps."""
    reached = 0.0
    for start, end in intervals:
        if end > reached:
            yield max(start, reached), end
            reached = end
