"""The timeline of a step, case by case: predicted queues, or else what rank 0 recorded."""

from collections.abc import Sequence

from shardwise.bench.results import Bench, CaseResult
from shardwise.quantities import seconds_text
from shardwise.report.page.bars import key
from shardwise.report.page.lanes import VERBS, exposed_gaps, kind_of, lane_chart
from shardwise.report.page.markup import Markup, element, numbers_below, small, table
from shardwise.report.page.section import PageSection, cases_that_ran, section
from shardwise.report.tape_spans import recorded_spans
from shardwise.span import Span


def timeline_section(bench: Bench) -> PageSection | None:
    """Predicted spans of all cases that have them, on one scale; where none has, the tapes."""
    cases = cases_that_ran(bench)
    drawn: list[tuple[CaseResult, Sequence[Span]]]
    drawn = [(case, case.predicted.spans) for case in cases if case.predicted and case.predicted.spans]
    is_predicted = bool(drawn)
    if not is_predicted:
        drawn = [(case, recorded_spans(case.tape)) for case in cases if case.tape]
    end = max((span.end for _, spans in drawn for span in spans), default=0.0)
    if not end:
        return None
    verbs = {kind_of(span.name) for _, spans in drawn for span in spans}
    if is_predicted and any(next(exposed_gaps(spans), None) for _, spans in drawn):
        verbs.add("exposed")
    names = {verb: words for verb, words in VERBS.items() if verb in verbs}
    return section(
        "timeline",
        "Timeline of a step" + (", predicted" if is_predicted else ", as rank 0 recorded it"),
        key(names),
        *(_figure(case, spans, end=end, is_predicted=is_predicted) for case, spans in drawn),
        numbers_below(_table(drawn), what="The busy seconds"),
        small(_PREDICTED if is_predicted else _RECORDED),
        short="Timeline",
    )


_PREDICTED = (
    "From the planner, not measured: when each queue of a rank would be busy in a step in the middle of training. "
    "Hatched: nothing is computed while something is on a wire; where a launch is what the device waits for, that is "
    "not counted as exposed."
)
_RECORDED = (
    "From the tape of rank 0, of the step whose memory was recorded, which makes it slower than the timed ones. What "
    "computes lasts until the next operation was issued; a gather or reduce from its issue until it had been waited "
    "for."
)


def _figure(case: CaseResult, spans: Sequence[Span], *, end: float, is_predicted: bool) -> Markup:
    words = f" {seconds_text(max(span.end for span in spans))}"
    if is_predicted and case.predicted is not None and case.predicted.exposed_seconds is not None:
        exposed = case.predicted.exposed_seconds
        words += f", {seconds_text(exposed)} of it exposed" if exposed else ", nothing exposed"
    describe = f"Timeline of {case.name}: compute, gather and reduce"
    return element(
        "figure",
        element("figcaption", element("b", case.name), words),
        lane_chart(spans, end_seconds=end, marks_exposed=is_predicted, describe=describe),
    )


def _table(drawn: Sequence[tuple[CaseResult, Sequence[Span]]]) -> Markup:
    kinds = [verb for verb in VERBS if any(kind_of(span.name) == verb for _, spans in drawn for span in spans)]

    def busy(spans: Sequence[Span], kind: str) -> str:
        seconds = sum(span.end - span.start for span in spans if kind_of(span.name) == kind)
        return seconds_text(seconds) if seconds else "–"

    return table(["case", *kinds], [[case.name, *(busy(spans, kind) for kind in kinds)] for case, spans in drawn])
