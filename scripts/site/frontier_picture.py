"""The frontier as a picture: the best throughput for each memory budget, of the solver's plan and of each strategy.

    python scripts/site/frontier_picture.py

writes docs/images/frontier.svg, from what `shardwise plan llama-3.1-8b --cluster 8x8xh100-80gb --strategy auto
--frontier` computes, at more budgets. It takes about half a minute, so it is not among the pictures of pictures.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pictures import FOLDER, WIDTH, svg, text

from shardwise.hardware import cluster_of
from shardwise.plan import Plan
from shardwise.planner.search.auto import AutoRequest
from shardwise.planner.search.candidates import Candidate
from shardwise.planner.search.frontier import FrontierPoint, frontier
from shardwise.report.page.axes import between
from shardwise.sources import Source

MODEL, CLUSTER, NUM_BUDGETS = "llama-3.1-8b", "8x8xh100-80gb", 20
LEFT, TOP, BOTTOM, HEIGHT = 46.0, 28.0, 232.0, 304.0
# Each is readable on a light and on a dark page.
COLOURS = {
    "auto": "#5c6bc0",
    "fsdp": "#26a69a",
    "shard_grad_op": "#fb8c00",
    "zero2": "#ec407a",
    "zero1": "#8d6e63",
    "ddp": "#78909c",
}
_GIB = 2**30

Line = list[tuple[float, float]]
"""(GiB, tokens per second and GPU) at each budget at which something fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Where a value lies in the picture."""

    most_gib: float
    low: float
    high: float

    def x(self, gib: float) -> float:
        return LEFT + (WIDTH - LEFT - 6) * gib / self.most_gib

    def y(self, speed: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (speed - self.low) / (self.high - self.low)


def points() -> list[FrontierPoint]:
    request = AutoRequest(plan=Plan(precision="bf16"), cluster=cluster_of(CLUSTER))
    return frontier(Source(MODEL).spec_for, request=request, num_budgets=NUM_BUDGETS)


def lines(found: Sequence[FrontierPoint]) -> dict[str, Line]:
    """Name → its line; strategies that fit nowhere have none."""
    by_name: dict[str, Line] = {}
    for name in COLOURS:
        chosen = ((one.budget_bytes, one.auto if name == "auto" else one.by_strategy.get(name)) for one in found)
        by_name[name] = [(budget / _GIB, speed(plan)) for budget, plan in chosen if plan is not None]
    return by_name


def speed(plan: Candidate) -> float:
    """Tokens per second and GPU."""
    assert plan.time is not None
    assert plan.seq is not None
    return plan.time.samples_per_s * plan.seq / plan.cluster.num_ranks


def picture(found: Sequence[FrontierPoint]) -> str:
    drawn = lines(found)
    speeds = [value for line in drawn.values() for _, value in line]
    field = Field(most_gib=found[-1].budget_bytes / _GIB, low=0.97 * min(speeds), high=1.01 * max(speeds))
    parts = list(_axes(field))
    # The solver's last, over those of the strategies that it chooses from.
    for name in reversed(COLOURS):
        parts += _line(drawn[name], field=field, colour=COLOURS[name], wide=name == "auto")
    parts += _legend([name for name in COLOURS if drawn[name]])
    missing = [name for name in COLOURS if not drawn[name]]
    if missing:
        parts.append(text(LEFT, HEIGHT - 4, f"{', '.join(missing)}: does not fit", style="faint small"))
    title = f"{MODEL} on 64 H100: predicted tokens per second and GPU for each memory budget"
    return svg(parts, height=HEIGHT, title=title)


def _axes(field: Field) -> Iterator[str]:
    yield text(0, 14, "tokens/s/GPU, predicted", style="ink strong")
    yield text(WIDTH - 6, 14, "the axis does not begin at 0", style="faint small", anchor="end")
    for value, words in between(field.low, field.high):
        y = field.y(value)
        yield f'<path d="M{LEFT:g} {y:.1f}H{WIDTH - 6}" class="line" stroke-width=".5"/>'
        yield text(LEFT - 6, y + 4, words, style="faint small", anchor="end")
    for gib in range(0, int(field.most_gib) + 1, 10):
        yield text(field.x(gib), BOTTOM + 16, str(gib), style="faint small", anchor="middle")
    yield text(WIDTH - 6, BOTTOM + 32, "GiB per device that may be used", style="ink small", anchor="end")


def _line(line: Line, *, field: Field, colour: str, wide: bool) -> Iterator[str]:
    if not line:
        return
    places = [(field.x(gib), field.y(value)) for gib, value in line]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{2.5 if wide else 1.5:g}"/>'
    yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3 if wide else 2:g}" fill="{colour}"/>' for x, y in places)


def _legend(names: Sequence[str]) -> Iterator[str]:
    x, y = LEFT, BOTTOM + 48
    for name in names:
        yield f'<path d="M{x:g} {y - 4:g}h16" stroke="{COLOURS[name]}" stroke-width="3"/>'
        yield text(x + 21, y, name, style="faint small")
        x += 36 + 6.0 * len(name)


def main() -> None:
    path = FOLDER / "frontier.svg"
    path.write_text(picture(points()))
    print(path)


if __name__ == "__main__":
    main()
