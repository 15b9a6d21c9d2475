"""The timeline of one step for each case, on one axis that can be zoomed: what rank 0 did, or what was predicted.

A timeline is as long as the step time that the page shows for its case: measured if there is a tape, else predicted.
Its exposed communication is what the page shows for the case everywhere (CaseResult.exposed_seconds).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.base.vocabulary.quantities import seconds_text
from shardwise.base.vocabulary.span import Span, busy_seconds, exposed_gaps
from shardwise.measure.bench.case_result import CaseResult
from shardwise.measure.bench.results import Bench
from shardwise.measure.report.page.bars import key
from shardwise.measure.report.page.lanes import VERBS, kind_of, lane_chart, time_axis
from shardwise.measure.report.page.markup import Markup, element, numbers_below, table
from shardwise.measure.report.page.section import PageSection, section

_MOST_SHOWN = 6
"""Further cases are folded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseTimeline:
    """The spans of one case; `seconds` is the length of its step, `exposed` when communication is exposed in it."""

    case: CaseResult
    spans: Sequence[Span]
    exposed: Sequence[Span]
    seconds: float
    is_predicted: bool


def timelines(bench: Bench) -> list[CaseTimeline]:
    """Return the timelines of the cases that ran: from the tape, else from the planner's prediction."""
    found = []
    for case in bench.ran:
        predicted = case.predicted
        if case.tape:
            spans, exposed = case.spans, case.exposed_spans
            found.append(
                CaseTimeline(case=case, spans=spans, exposed=exposed, seconds=case.seconds, is_predicted=False)
            )
        elif predicted is not None and predicted.step_seconds is not None and predicted.spans:
            spans, seconds = list(predicted.spans), predicted.step_seconds
            exposed = list(exposed_gaps(spans))
            found.append(CaseTimeline(case=case, spans=spans, exposed=exposed, seconds=seconds, is_predicted=True))
    return found


def timeline_section(bench: Bench) -> PageSection | None:
    """Show all cases on one axis."""
    found = timelines(bench)
    if not found:
        return None
    # A prediction may reach into the next step.
    end = max(max(one.seconds, *(span.end for span in one.spans)) for one in found)
    verbs = {kind_of(span.name) for one in found for span in one.spans}
    if any(one.exposed for one in found):
        verbs.add("exposed")
    figures = [_figure(one, end=end) for one in found]
    more = figures[_MOST_SHOWN:]
    folded = element("details", element("summary", f"{len(more)} more cases"), *more) if more else None
    return section(
        "timeline",
        "Timeline of one step",
        element("div", key({verb: words for verb, words in VERBS.items() if verb in verbs}), _controls(), class_="row"),
        element(
            "div",
            element("div", time_axis(end), *figures[:_MOST_SHOWN], folded, class_="zoomed"),
            class_="window",
            tabindex="0",
            role="group",
            aria_label="Timelines; zoomed in, they scroll sideways",
        ),
        numbers_below(_table(found), *_notes(found), what="Busy time"),
        short="Timeline",
    )


def _controls() -> Markup:
    """Return the zoom buttons; the script shows them, since they do nothing without it."""
    buttons = [
        element("button", text, type="button", data_zoom=what, aria_label=words)
        for what, text, words in (("out", "−", "Zoom out"), ("in", "+", "Zoom in"), ("fit", "fit", "The whole step"))
    ]
    hint = element("small", "+ − 0, ctrl + wheel; drag to move")
    return element("div", element("output", "1×"), *buttons, hint, class_="zoom", role="group", aria_label="Zoom")


def _notes(found: Sequence[CaseTimeline]) -> list[str]:
    notes = []
    taped = [one for one in found if not one.is_predicted]
    if taped:
        scale = max((one.case.tape_scale for one in taped), key=lambda scale: abs(scale - 1))
        notes.append(
            "Measured: one step of rank 0, its times scaled to the median step time (by at most "
            f"{scale:.2f}). A computation lasts until the next operation was issued; a gather or reduce from its issue "
            "until it had been waited for. Several at once count once in the table."
        )
    if any(one.case.is_exposed_by_timeline for one in taped):
        notes.append(
            "Hatched, exposed communication: rank 0 computes nothing while something is being sent. It waits for the "
            "slowest rank too, and for a core where ranks share cores."
        )
    if not all(one.case.is_exposed_by_timeline for one in taped):
        notes.append("On a GPU the times are those at which the CPU issued operations, so nothing is hatched.")
    if len(taped) < len(found):
        notes.append(
            "Predicted: when each queue of a rank would be busy in a step in the middle of training. What reaches "
            "beyond the step time runs into the next step. Hatched: nothing is computed while something is being sent."
        )
    return notes


def _figure(one: CaseTimeline, *, end: float) -> Markup:
    words = f" {seconds_text(one.seconds)}"
    if one.is_predicted:
        words = f" predicted {seconds_text(one.seconds)}, measured {seconds_text(one.case.seconds)}"
    if one.exposed:
        words += f"; {seconds_text(busy_seconds(one.exposed))} of it exposed communication"
    describe = f"Timeline of {one.case.name}: compute, gather and reduce"
    return element(
        "figure",
        element("figcaption", element("b", one.case.name), words),
        lane_chart(one.spans, exposed=one.exposed, step_seconds=one.seconds, end_seconds=end, describe=describe),
    )


def _table(found: Sequence[CaseTimeline]) -> Markup:
    kinds = [verb for verb in VERBS if any(kind_of(span.name) == verb for one in found for span in one.spans)]

    def busy(one: CaseTimeline, kind: str) -> str:
        seconds = busy_seconds(span for span in one.spans if kind_of(span.name) == kind)
        return seconds_text(seconds) if seconds else "–"

    rows = [
        [
            one.case.name,
            seconds_text(one.seconds),
            *(busy(one, kind) for kind in kinds),
            seconds_text(busy_seconds(one.exposed)) if one.exposed else "–",
        ]
        for one in found
    ]
    return table(["case", "step time", *kinds, "exposed communication"], rows)
