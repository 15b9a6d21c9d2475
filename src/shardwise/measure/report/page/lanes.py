"""Draws queues as lanes: what each queue does when."""

from collections.abc import Sequence

from shardwise.base.vocabulary.quantities import second_unit, seconds_text
from shardwise.base.vocabulary.span import QUEUES, Span
from shardwise.measure.report.page.axes import second_ticks
from shardwise.measure.report.page.bars import axis_text
from shardwise.measure.report.page.markup import Markup, element, percent, title_of

VERBS = {
    "forward": "forward",
    "backward": "backward",
    "update": "update",
    "gather": "gather",
    "reduce": "reduce",
    "copy": "copy and other",
    "exposed": "exposed communication",
}
"""Class of page.css → words."""

_HEIGHT, _TOP, _THICK = 17, 1, 15
# A share of the width: a narrower span is merged with a close neighbour. It is small, since timelines can be zoomed.
_NARROW = 0.0005


def lane_chart(
    spans: Sequence[Span], *, exposed: Sequence[Span], step_seconds: float, end_seconds: float, describe: str
) -> Markup:
    """Draw one lane per queue, as long as the step, on an axis from 0 to `end_seconds` (`time_axis`).

    `exposed`: when nothing is computed while something is being sent.
    """
    lanes = []
    for queue in QUEUES:
        busy = [span for span in spans if span.queue == queue]
        if not busy:
            continue
        drawn = [_block(span, kind=kind_of(span.name), end=end_seconds) for span in merged(busy, end=end_seconds)]
        if queue == "compute":
            drawn += [_block(span, kind="exposed", end=end_seconds) for span in exposed]
        lanes.append(_lane(queue, drawn, length=step_seconds / end_seconds))
    return element("div", *lanes, class_="chart bars lanes", role="group", aria_label=describe)


def time_axis(end_seconds: float) -> Markup:
    """Draw the axis of lanes; the script redraws it from its data when the timeline is zoomed."""
    size, name = second_unit(end_seconds)
    texts = (axis_text(text, at=value / end_seconds, y=13) for value, text in second_ticks(end_seconds))
    end = f"{end_seconds / size:.9g}"
    drawn = element("svg", *texts, class_="track time-axis", height=18, data_end=end, data_unit=name)
    row = element("div", element("div", class_="label"), drawn, class_="bar")
    return element("div", row, class_="chart bars lanes")


def kind_of(name: str) -> str:
    """Return the class of a span, by its verb."""
    verb = name.partition(" ")[0]
    return verb if verb in VERBS else "copy"


def merged(spans: Sequence[Span], *, end: float) -> list[Span]:
    """Merge neighbours of one verb that are too narrow to be seen alone."""
    narrow = _NARROW * end
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        last = found[-1] if found else None
        if (
            last is not None
            and kind_of(last.name) == kind_of(span.name)
            and span.end - span.start < narrow
            and span.start - last.end < narrow / 4
            and last.end - last.start < 4 * narrow
        ):
            first = last.name.partition(" … ")[0]
            found[-1] = Span(span.queue, f"{first} … {span.name}", last.start, max(last.end, span.end))
        else:
            found.append(span)
    return found


def _lane(queue: str, drawn: Sequence[Markup], *, length: float) -> Markup:
    bed = element("rect", y=_TOP, width=percent(length), height=_THICK, class_="lane")
    return element(
        "div",
        element("div", queue, class_="label"),
        element("svg", bed, *drawn, class_="track", height=_HEIGHT),
        class_="bar",
    )


def _block(span: Span, *, kind: str, end: float) -> Markup:
    words = f"{span.name}: {seconds_text(span.end - span.start)}, starting at {seconds_text(span.start)}"
    # Even an instant is visible, and a narrow span has no outline, which would hide it.
    width = max((span.end - span.start) / end, _NARROW)
    style = kind if width > 3 * _NARROW else f"{kind} thin"
    x = min(span.start / end, 1 - width)
    return element("rect", title_of(words), x=percent(x), y=_TOP, width=percent(width), height=_THICK, class_=style)
