"""Horizontal bar charts. A bar has pieces, and may have a whisker, a mark, and a line for a limit.

A row is HTML (label, track, value), so that on a phone the label is above its bar; the track is SVG in percent.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.measure.report.page.axes import Tick
from shardwise.measure.report.page.markup import Child, Markup, element, percent, title_of

_HEIGHT = 25
_TOP, _THICK = 4, 17
_AXIS_HEIGHT = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPiece:
    """A part of a bar; `kind` is the class of page.css with its colour."""

    kind: str
    value: float
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar.

    `whisker` is (from, to). `mark` is a value to compare with, and its title. `remark` is small text next to the label.
    """

    label: str
    pieces: Sequence[BarPiece]
    text: str
    whisker: tuple[float, float] | None = None
    mark: tuple[float, str] | None = None
    remark: str = ""
    is_chosen: bool = False


def bar_chart(
    bars: Sequence[Bar], *, highest: float, ticks: Sequence[Tick], describe: str, limit: Tick | None = None
) -> Markup:
    """Draw the bars, from 0 to `highest`, above their axis, and `limit` as a line; screen readers read `describe`."""
    rows = [_row(bar, highest=highest, ticks=ticks, limit=limit) for bar in bars]
    if limit is not None:
        at = limit[0] / highest
        anchor = "end" if at > 0.5 else "start"
        rows.insert(0, _axis([element("text", limit[1], x=percent(at), y=13, text_anchor=anchor, class_="limit")]))
    axis = _axis(axis_text(text, at=value / highest, y=13) for value, text in ticks)
    return element("div", *rows, axis, class_="chart bars", role="group", aria_label=describe)


def key(names: Mapping[str, str]) -> Markup:
    """Return the legend of the colours: class → words."""
    swatches = (element("li", element("i", class_=kind, aria_hidden="true"), words) for kind, words in names.items())
    return element("ul", *swatches, class_="key")


def _row(bar: Bar, *, highest: float, ticks: Sequence[Tick], limit: Tick | None) -> Markup:
    label: list[Child] = [element("b", bar.label)]
    if bar.remark:
        label.append(element("small", bar.remark))
    return element(
        "div",
        element("div", *label, class_="label"),
        element("svg", *_drawn(bar, highest=highest, ticks=ticks, limit=limit), class_="track", height=_HEIGHT),
        element("div", bar.text, class_="value"),
        class_="bar chosen" if bar.is_chosen else "bar",
    )


def _drawn(bar: Bar, *, highest: float, ticks: Sequence[Tick], limit: Tick | None) -> list[Markup]:
    drawn = [_vertical(value / highest, class_="grid") for value, _ in ticks]
    start = 0.0
    for piece in bar.pieces:
        if piece.value > 0:
            drawn.append(
                element(
                    "rect",
                    title_of(piece.title),
                    x=percent(start / highest),
                    y=_TOP,
                    width=percent(piece.value / highest),
                    height=_THICK,
                    class_=piece.kind,
                )
            )
        start += piece.value
    if bar.whisker is not None:
        drawn += _whisker(*bar.whisker, highest=highest)
    if bar.mark is not None:
        value, words = bar.mark
        drawn.append(_vertical(value / highest, class_="mark", top=_TOP - 4, bottom=_TOP + _THICK + 4, title=words))
    if limit is not None:
        drawn.append(_vertical(limit[0] / highest, class_="limit", title=limit[1]))
    return drawn


def _whisker(low: float, high: float, *, highest: float) -> list[Markup]:
    middle = _TOP + _THICK / 2
    left, right = percent(low / highest), percent(high / highest)
    along = element("line", x1=left, x2=right, y1=middle, y2=middle, class_="whisker")
    ends = [_vertical(value / highest, class_="whisker", top=middle - 4, bottom=middle + 4) for value in (low, high)]
    return [along, *ends]


def _vertical(at: float, *, class_: str, top: float = 0, bottom: float = _HEIGHT, title: str | None = None) -> Markup:
    words = None if title is None else title_of(title)
    return element("line", words, x1=percent(at), x2=percent(at), y1=top, y2=bottom, class_=class_)


def _axis(texts: Iterable[Markup]) -> Markup:
    return element("div", element("svg", *texts, class_="track", height=_AXIS_HEIGHT), class_="bar axis")


def axis_text(text: str, *, at: float, y: float) -> Markup:
    """Return a text of a horizontal axis; at both ends it is aligned so that it stays within the axis."""
    anchor = "start" if at < 0.04 else "end" if at > 0.94 else "middle"
    return element("text", text, x=percent(at), y=y, text_anchor=anchor, class_="tick")
