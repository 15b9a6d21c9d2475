"""A span of a step's timeline: which queue was busy with what, from when to when.

The planner predicts them, a recorded tape gives them, and the report draws them.
"""

from typing import Final, NamedTuple

QUEUES: Final = ("compute", "gather", "reduce")
"""The queues of a device: what it computes, and the two streams of its collectives."""


class Span(NamedTuple):
    """`queue` (one of QUEUES) was busy with `name` from `start` to `end`, in seconds since the step began."""

    queue: str
    name: str
    start: float
    end: float
