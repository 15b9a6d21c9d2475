"""A recorded tape, and its spans. No torch here.

A tape only records when each operation was issued, when a wait ended and when an update was done. A computation lasts
until the next operation, an update from the previous operation on, and a collective from its issue until the end of the
wait for it (it may have arrived earlier).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.base.vocabulary.span import Span
from shardwise.program import Kind
from shardwise.program.operations import COMPUTES, WAITS

_WAITS = {wait.value: kind for wait, kind in WAITS.items()}
_SENDS = {kind.value: kind for kind in WAITS.values()}
_COMPUTES = tuple(kind.value for kind in COMPUTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """An operation of the tape: its kind and subject, when after the step began, and its row of the ledger."""

    kind: str
    subject: str
    num_bytes: int
    seconds: float
    row: int


def recorded_spans(tape: Sequence[Happening], *, end: float | None = None) -> list[Span]:
    """Return the spans of a tape in order of their ends.

    The last computation, and a collective without a wait, last until `end` (default: the tape's last operation).
    """
    spans: list[Span] = []
    on_wire: dict[tuple[Kind, str], float] = {}
    last = end if end is not None else tape[-1].seconds if tape else 0.0
    moments = [one.seconds for one in tape]
    for one, before, after in zip(tape, [0.0, *moments], [*moments[1:], last], strict=False):
        name = f"{one.kind} {one.subject}"
        if one.kind == Kind.UPDATE.value:
            spans.append(Span("compute", name, before, one.seconds))
        elif one.kind in _COMPUTES:
            spans.append(Span("compute", name, one.seconds, after))
        elif one.kind in _WAITS:
            kind = _WAITS[one.kind]
            issued = on_wire.pop((kind, one.subject), None)
            if issued is not None:
                spans.append(Span(kind.stream, f"{kind.value} {one.subject}", issued, one.seconds))
        elif one.kind in _SENDS:
            on_wire[_SENDS[one.kind], one.subject] = one.seconds
    spans += [Span(kind.stream, f"{kind.value} {subject}", start, last) for (kind, subject), start in on_wire.items()]
    return spans
