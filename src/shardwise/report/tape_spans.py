"""Turns a recorded tape into spans, for the page and for traces.

A tape only records when each operation was issued, when a wait ended and when an update was done. A computation lasts
until the next operation, an update from the previous operation on, and a collective from its issue until the end of the
wait for it (it may have arrived earlier).

The taped step was slightly faster or slower than the median step. Its times are scaled, so that every picture of a step
is as long as the step time that is shown for the case.
"""

from collections.abc import Sequence
from dataclasses import replace

from shardwise.bench.case_result import CaseResult, Happening
from shardwise.program import Kind
from shardwise.program.operations import COMPUTES, WAITS
from shardwise.vocabulary.span import Span

_WAITS = {wait.value: kind for wait, kind in WAITS.items()}
_SENDS = {kind.value: kind for kind in WAITS.values()}
_COMPUTES = tuple(kind.value for kind in COMPUTES)


def tape_scale(case: CaseResult) -> float:
    """Return the median step time relative to the taped step, whose length is at least that of its operations."""
    last = max((one.seconds for one in case.tape), default=0.0)
    length = max(case.tape_seconds or 0.0, last)
    return case.step_seconds.median / length if case.step_seconds is not None and length else 1.0


def scaled_tape(case: CaseResult) -> tuple[Happening, ...]:
    """Return the tape, scaled to the length of the median step."""
    scale = tape_scale(case)
    return tuple(replace(one, seconds=one.seconds * scale) for one in case.tape)


def spans_of(case: CaseResult) -> list[Span]:
    """Return the scaled tape as spans, which end with the step."""
    end = case.step_seconds.median if case.step_seconds is not None else None
    return recorded_spans(scaled_tape(case), end=end)


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
