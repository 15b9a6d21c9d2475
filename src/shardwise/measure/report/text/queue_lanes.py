"""Draws the queues of a step as lanes of text: what each queue does when."""

from collections.abc import Sequence

from shardwise.base.vocabulary.quantities import seconds_text
from shardwise.base.vocabulary.span import QUEUES, Span

_WIDTH = 72
_LETTERS = {"forward": "F", "backward": "B", "update": "U", "gather": "g", "reduce": "r"}
_OTHER = "c"


def as_lanes(spans: Sequence[Span], *, width: int = _WIDTH) -> str:
    """Draw one line per queue. A column shows what took most of it; `:` means busy for less than half of it."""
    end = max((span.end for span in spans), default=0.0)
    if not end:
        return ""
    lines = [f"{queue:8}{_lane([s for s in spans if s.queue == queue], end=end, width=width)}" for queue in QUEUES]
    scale = f"{'':8}0{seconds_text(end):>{width - 1}}"
    legend = "F forward  B backward  U update  c copy  g gather  r reduce  : less than half of a column  · idle"
    return "\n".join([*lines, scale, legend])


def _lane(spans: Sequence[Span], *, end: float, width: int) -> str:
    busy: list[dict[str, float]] = [{} for _ in range(width)]
    for span in spans:
        letter = _LETTERS.get(span.name.partition(" ")[0], _OTHER)
        first, last = span.start / end * width, span.end / end * width
        for column in range(int(first), min(width, int(last) + 1)):
            part = min(last, column + 1) - max(first, column)
            busy[column][letter] = busy[column].get(letter, 0.0) + part
    return "".join(_sign(column) for column in busy)


def _sign(column: dict[str, float]) -> str:
    """Return the letter that took most of a column, if the queue was busy for half of it."""
    busy = sum(column.values())
    if busy < 0.5:
        return ":" if busy else "·"
    return max(column, key=lambda letter: column[letter])


def as_data(spans: Sequence[Span]) -> list[dict[str, object]]:
    return [{"queue": s.queue, "name": s.name, "start_seconds": s.start, "end_seconds": s.end} for s in spans]
