"""The cost of a training run, and the frontier of memory budgets, as tables and as JSON."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from shardwise.base.vocabulary.quantities import GIB, digits, fixed, significant
from shardwise.measure.report.text.plain_table import plain_table
from shardwise.planner.search.candidates import Candidate

if TYPE_CHECKING:
    from shardwise.planner.search.frontier import FrontierPoint
    from shardwise.planner.search.training_cost import TrainingCost

_COSTS = ("global_batch", "global_batch_tokens", "mfu", "tokens_per_day", "days", "gpu_hours", "cost")


def training_table(rows: "Sequence[TrainingCost]") -> Table:
    heads = ["training", "samples/step", "tokens/step", "MFU", "tokens/day", "days", "GPU-hours"]
    if any(row.cost is not None for row in rows):
        heads.append("cost")
    table = plain_table(heads, right=heads[1:], gap=1)
    for row in rows:
        cells = [
            row.candidate.name,
            f"{row.global_batch:,}",
            large_number(row.global_batch_tokens),
            f"{row.mfu:.0%}" if row.mfu is not None else "?",
            large_number(row.tokens_per_day),
            digits(row.days),
            large_number(row.gpu_hours),
        ]
        table.add_row(*cells, *([f"{row.cost:,.0f}"] if row.cost is not None else []))
    return table


def training_data(row: "TrainingCost") -> dict[str, Any]:
    return {"strategy": row.candidate.name} | {name: getattr(row, name) for name in _COSTS}


def large_number(value: float) -> str:
    """Format a number with three digits and a letter: `1.05M`, `31.2B`, `1.20T`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return digits(value)


def frontier_table(points: "Sequence[FrontierPoint]") -> Table:
    """Return a table with one row per budget: the solver's plan, and the best plan that is the same for all units."""
    heads = (f"budget {GIB.name}", "auto samples/s", "batch", "fastest fixed plan", "samples/s", "auto is")
    table = plain_table(heads, right=[head for head in heads if head != "fastest fixed plan"])
    for point in points:
        table.add_row(
            fixed(point.budget_bytes, unit=GIB),
            significant(_rate(point.auto)) if point.auto is not None else "does not fit",
            str(point.auto.batch) if point.auto is not None else "",
            _fixed_name(point.fixed) if point.fixed is not None else "none fits",
            significant(_rate(point.fixed)) if point.fixed is not None else "",
            f"{_rate(point.auto) / _rate(point.fixed):.3f} ×" if point.auto and point.fixed else "",
        )
    return table


def frontier_data(points: "Sequence[FrontierPoint]") -> list[dict[str, Any]]:
    return [
        {"budget_bytes": point.budget_bytes, "auto": _point_data(point.auto), "fixed": _point_data(point.fixed)}
        for point in points
    ]


def _point_data(candidate: Candidate | None) -> dict[str, Any] | None:
    if candidate is None:
        return None
    memory, plan = candidate.memory.device_bytes, candidate.plan.to_dict()
    return {"samples_per_s": _rate(candidate), "device_bytes": memory, "plan": plan}


def _fixed_name(candidate: Candidate) -> str:
    plan = candidate.plan
    mesh = f" {plan.mesh}" if plan.mesh is not None and plan.mesh.replicate > 1 else ""
    return f"{plan.strategy}{mesh}{plan.across_text}, recompute {plan.recompute}, batch {candidate.batch}"


def _rate(candidate: Candidate) -> float:
    assert candidate.time is not None
    return candidate.time.samples_per_s
