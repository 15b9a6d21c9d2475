"""Lines over two axes, as parts of a picture."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pictures import WIDTH, text

from shardwise.measure.report.page.axes import between

LEFT, TOP, BOTTOM, HEIGHT = 46.0, 28.0, 232.0, 304.0

Line = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Horizontally from 0 to `most`, vertically from `low` to `high`."""

    most: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - 6) * value / self.most

    def y(self, value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (value - self.low) / (self.high - self.low)

    def axes(self, *, upwards: str, across: str, every: int, remark: str = "") -> Iterator[str]:
        """Draw both axes with their words, and a number across at `every` so many."""
        yield text(0, 14, upwards, style="ink strong")
        if remark:
            yield text(WIDTH - 6, 14, remark, style="faint small", anchor="end")
        for value, words in between(self.low, self.high):
            y = self.y(value)
            yield f'<path d="M{LEFT:g} {y:.1f}H{WIDTH - 6}" class="line" stroke-width=".5"/>'
            yield text(LEFT - 6, y + 4, words, style="faint small", anchor="end")
        for number in range(0, int(self.most) + 1, every):
            is_at_edge = self.x(number) > WIDTH - 18
            yield text(
                self.x(number), BOTTOM + 16, str(number), style="faint small", anchor="end" if is_at_edge else "middle"
            )
        yield text(WIDTH - 6, BOTTOM + 32, across, style="ink small", anchor="end")

    def line(self, line: Line, *, colour: str, wide: bool = False) -> Iterator[str]:
        if not line:
            return
        places = [(self.x(across), self.y(up)) for across, up in line]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{2.5 if wide else 1.5:g}"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3 if wide else 2:g}" fill="{colour}"/>' for x, y in places)


def legend(colours: Mapping[str, str]) -> Iterator[str]:
    """Draw each name with its colour."""
    x, y = LEFT, BOTTOM + 48
    for name, colour in colours.items():
        yield f'<path d="M{x:g} {y - 4:g}h16" stroke="{colour}" stroke-width="3"/>'
        yield text(x + 21, y, name, style="faint small")
        x += 36 + 6.0 * len(name)
