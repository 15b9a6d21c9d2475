"""A span of a step's timeline: one queue works on one operation, from a start to an end.

The planner predicts spans, a recorded tape gives them, and the report draws them.
"""

from typing import Final, NamedTuple

QUEUES: Final = ("compute", "gather", "reduce")
"""The queues of a device: its computations, and the two streams of its collectives."""


class Span(NamedTuple):
    """`queue` (one of QUEUES) was busy with `name` from `start` to `end`, in seconds since the step began."""

    queue: str
    name: str
    start: float
    end: float
