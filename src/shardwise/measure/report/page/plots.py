"""Draws curves and areas over steps or rows.

The field is an SVG without a view box, so that its text keeps its size. Inside it is an SVG that is 1000 units wide and
stretched; its strokes keep their width.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.measure.report.page.axes import Tick
from shardwise.measure.report.page.bars import axis_text
from shardwise.measure.report.page.markup import Markup, element, join, percent, title_of

_WIDTH = 1000
_ROOM = 20
"""Space below the field for the text of the horizontal axis."""
_ABOVE = 8
_DASH = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One curve; `kind` is the class of page.css with its colour."""

    name: str
    kind: str
    values: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotFrame:
    """The vertical axis, from `low` to `high`, and the text along the horizontal axis, from 0 to 1."""

    low: float
    high: float
    ticks: Sequence[Tick]
    below: Sequence[Tick]
    height: int

    def y(self, value: float) -> float:
        """Return the pixels from the top."""
        return _ABOVE + (self.height - _ABOVE) * (1 - (value - self.low) / ((self.high - self.low) or 1))


def curve_plot(curves: Sequence[Curve], *, frame: PlotFrame, describe: str) -> Markup:
    """Draw all curves in one field, on an axis that is as long as the longest.

    Each curve is a thin line with thick dashes over it. The dashes of different curves alternate, so that curves that
    coincide do not hide each other.
    """
    longest = max(len(curve.values) for curve in curves)
    paths = []
    for style in ("curve", "dashes") if len(curves) > 1 else ("curve",):
        for turn, curve in enumerate(curves):
            is_dashed = style == "dashes"
            path = element(
                "polyline",
                title_of(curve.name),
                points=_points(curve.values, longest=longest, frame=frame),
                class_=f"{style} {curve.kind}",
                stroke_dasharray=f"{_DASH} {_DASH * (len(curves) - 1)}" if is_dashed else None,
                stroke_dashoffset=-_DASH * turn if is_dashed else None,
            )
            paths.append(path)
    return _plot(_stretched(paths, height=frame.height), frame=frame, describe=describe)


def area_plot(
    columns: Sequence[Mapping[str, float]],
    *,
    titles: Sequence[str],
    line: Sequence[float | None],
    frame: PlotFrame,
    describe: str,
) -> Markup:
    """Draw columns of equal width, each a stack of class → value, and a line of steps, broken where it has no value."""
    names = list(dict.fromkeys(name for column in columns for name in column))
    floor = [0.0] * len(columns)
    paths = []
    for name in names:
        top = [below + column.get(name, 0.0) for below, column in zip(floor, columns, strict=True)]
        if any(column.get(name) for column in columns):
            paths.append(element("path", d=_band(floor, top, frame=frame), class_=name))
        floor = top
    if any(value is not None for value in line):
        paths.append(element("path", d=_stairs(line, frame=frame), class_="expected"))
    over = [
        element(
            "rect", title_of(title), x=percent(at / len(columns)), width=percent(1 / len(columns)), height=frame.height
        )
        for at, title in enumerate(titles)
    ]
    drawn = join([_stretched(paths, height=frame.height), element("g", *over, class_="over")])
    return _plot(drawn, frame=frame, describe=describe)


def _plot(drawn: Markup, *, frame: PlotFrame, describe: str) -> Markup:
    lines = [
        element("line", x1="0", x2="100%", y1=frame.y(value), y2=frame.y(value), class_="grid")
        for value, _ in frame.ticks
    ]
    words = [axis_text(text, at=at, y=frame.height + 15) for at, text in frame.below]
    tick_texts = [
        element("text", text, x="100%", y=frame.y(value) + 4, text_anchor="end", class_="tick")
        for value, text in frame.ticks
    ]
    height = frame.height + _ROOM
    return element(
        "div",
        element("svg", *tick_texts, class_="beside", height=height),
        element("svg", *lines, drawn, *words, class_="field", height=height),
        class_="chart plot",
        role="group",
        aria_label=describe,
    )


def _stretched(paths: Sequence[Markup], *, height: int) -> Markup:
    return element(
        "svg", *paths, width="100%", height=height, viewBox=f"0 0 {_WIDTH} {height}", preserveAspectRatio="none"
    )


def _points(values: Sequence[float], *, longest: int, frame: PlotFrame) -> str:
    step = _WIDTH / max(1, longest - 1)
    seen = [(at, value) for at, value in enumerate(values) if math.isfinite(value)]
    return " ".join(f"{at * step:.1f},{frame.y(value):.1f}" for at, value in seen)


def _band(floor: Sequence[float], top: Sequence[float], *, frame: PlotFrame) -> str:
    """Return the path along the top from left to right, and back along the floor."""
    width = _WIDTH / len(top)
    there = [f"{x:.1f},{frame.y(value):.1f}" for at, value in enumerate(top) for x in (at * width, (at + 1) * width)]
    back = [f"{x:.1f},{frame.y(value):.1f}" for at, value in enumerate(floor) for x in (at * width, (at + 1) * width)]
    return f"M{' '.join(there)} {' '.join(reversed(back))}Z"


def _stairs(values: Sequence[float | None], *, frame: PlotFrame) -> str:
    width = _WIDTH / len(values)
    parts, is_drawing = [], False
    for at, value in enumerate(values):
        if value is not None:
            y = f"{frame.y(value):.1f}"
            parts.append(f"{'L' if is_drawing else 'M'}{at * width:.1f},{y}H{(at + 1) * width:.1f}")
        is_drawing = value is not None
    return "".join(parts)
