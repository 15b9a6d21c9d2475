"""A recorded tape as spans, for the page and for traces.

A tape says when each operation was issued, and when a wait was over, and no more. So what computes lasts until the
next operation, and a collective from its issue until it had been waited for (it may have arrived before).
"""

from collections.abc import Sequence

from shardwise.bench.results import Happening
from shardwise.program import Kind
from shardwise.program.operations import WAITS
from shardwise.span import Span

_WAITS = {wait.value: kind for wait, kind in WAITS.items()}
_SENDS = {kind.value: kind for kind in WAITS.values()}
_COMPUTES = (Kind.FORWARD.value, Kind.BACKWARD.value, Kind.UPDATE.value)


def recorded_spans(tape: Sequence[Happening]) -> list[Span]:
    """In order of their ends; a collective without a wait lasts until the tape ends."""
    spans: list[Span] = []
    on_wire: dict[tuple[Kind, str], float] = {}
    last = tape[-1].seconds if tape else 0.0
    for at, one in enumerate(tape):
        if one.kind in _COMPUTES:
            end = tape[at + 1].seconds if at + 1 < len(tape) else last
            spans.append(Span("compute", f"{one.kind} {one.subject}", one.seconds, end))
        elif one.kind in _WAITS:
            kind = _WAITS[one.kind]
            start = on_wire.pop((kind, one.subject), None)
            if start is not None:
                spans.append(Span(kind.stream, f"{kind.value} {one.subject}", start, one.seconds))
        elif one.kind in _SENDS:
            on_wire[_SENDS[one.kind], one.subject] = one.seconds
    spans += [Span(kind.stream, f"{kind.value} {subject}", start, last) for (kind, subject), start in on_wire.items()]
    return spans
