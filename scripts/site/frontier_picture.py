"""The frontier as a picture: the best throughput for each memory budget, of the solver's plan and of each strategy.

    python scripts/site/frontier_picture.py

writes docs/images/frontier.svg, from what `shardwise plan llama-3.1-8b --cluster 8x8xh100-80gb --strategy auto
--frontier` computes, at more budgets. It takes about half a minute, so it is not among the pictures of pictures.py.
"""

from collections.abc import Sequence

from line_chart import HEIGHT, LEFT, Chart, legend
from pictures import FOLDER, svg, text

from shardwise.hardware import cluster_of
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.planner.search.candidates import Candidate
from shardwise.planner.search.frontier import FrontierPoint, frontier
from shardwise.planner.search.request import AutoRequest

MODEL, CLUSTER, NUM_BUDGETS = "llama-3.1-8b", "8x8xh100-80gb", 20
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

FrontierLine = list[tuple[float, float]]
"""(GiB, tokens per second and GPU) at each budget at which something fits."""


def points() -> list[FrontierPoint]:
    request = AutoRequest(plan=Plan(precision="bf16"), cluster=cluster_of(CLUSTER))
    return frontier(Model(MODEL).spec_for, request=request, num_budgets=NUM_BUDGETS)


def lines(found: Sequence[FrontierPoint]) -> dict[str, FrontierLine]:
    """Name → its line; strategies that fit nowhere have none."""
    by_name: dict[str, FrontierLine] = {}
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
    chart = Chart(most=found[-1].budget_bytes / _GIB, low=0.97 * min(speeds), high=1.01 * max(speeds))
    words = ("tokens/s/GPU, predicted", "GiB per device that may be used", "the axis does not begin at 0")
    parts = list(chart.axes(upwards=words[0], across=words[1], remark=words[2], every=10))
    # The solver's last, over those of the strategies that it chooses from.
    for name in reversed(COLOURS):
        parts += chart.line(drawn[name], colour=COLOURS[name], wide=name == "auto")
    parts += legend({name: colour for name, colour in COLOURS.items() if drawn[name]})
    missing = [name for name in COLOURS if not drawn[name]]
    if missing:
        parts.append(text(LEFT, HEIGHT - 4, f"{', '.join(missing)}: does not fit", style="faint small"))
    title = f"{MODEL} on 64 H100: predicted tokens per second and GPU for each memory budget"
    return svg(parts, height=HEIGHT, title=title)


def main() -> None:
    path = FOLDER / "frontier.svg"
    path.write_text(picture(points()))
    print(path)


if __name__ == "__main__":
    main()
