"""Draws a plan as text: the placement of every unit, what the placements mean, and one step."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import strategy_of
from shardwise.planner.search.chosen_text import chosen_text
from shardwise.report.snapshots import snapshots_of
from shardwise.report.text.fp8_table import fp8_lines
from shardwise.report.text.step_picture import in_words, step_lines, sum_lines
from shardwise.spec import ROOT, ModelSpec


def explain_plan(spec: ModelSpec, *, plan: Plan, num_ranks: int) -> list[str]:
    """Draw a plan on a model, 80 columns wide if the names of units are short."""
    mesh = plan.mesh or Mesh(shard=num_ranks)
    step = snapshots_of(spec, plan=plan, num_ranks=num_ranks)
    names = [unit.name for unit in spec.units]
    meanings = []
    for placement in dict.fromkeys(plan.placements(names).values()):
        first, *rest = in_words(placement, num_groups=mesh.replicate)
        meanings += [f"{strategy_of(placement)}: {first}", *(f"  {line}" for line in rest)]
    return [
        f"{spec.name} on {mesh} ranks: {chosen_text(plan, names=names)}",
        "",
        *_unit_lines(spec, plan=plan),
        "",
        *(fp8 := fp8_lines(spec, plan=plan)),
        *([""] if fp8 else []),
        *meanings,
        "",
        *step_lines(step, spec=spec),
        "",
        *sum_lines(step),
    ]


def plan_as_data(spec: ModelSpec, *, plan: Plan, num_ranks: int) -> dict[str, Any]:
    """Return the placements and the peak for JSON."""
    step = snapshots_of(spec, plan=plan, num_ranks=num_ranks)
    return {
        "model": spec.name,
        "ranks": num_ranks,
        "plan": plan.to_dict(),
        "units": [{"name": name, "strategy": row, "recompute": way} for name, row, way in _choices(spec, plan=plan)],
        "peak_bytes": step.peak.held_bytes,
    }


def _choices(spec: ModelSpec, *, plan: Plan) -> list[tuple[str, str, str]]:
    """Return (unit, strategy, recompute) of each unit."""
    return [
        (name, strategy_of(placement), plan.recompute_of(name))
        for name, placement in plan.placements(unit.name for unit in spec.units).items()
    ]


def _unit_lines(spec: ModelSpec, *, plan: Plan) -> Iterator[str]:
    """Yield one line per run of consecutive units with equal placement and recompute."""
    rows = []
    for (row, way, _), group in groupby(_choices(spec, plan=plan), key=lambda one: (one[1], one[2], one[0] == ROOT)):
        names = [name for name, _, _ in group]
        named = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        rows.append((named, str(len(names)), row, "" if names == [ROOT] else way))
    heads = ("units", "number", "placement", "recompute")
    widths = [max(len(line[at]) for line in (heads, *rows)) + 2 for at in range(len(heads))]
    for line in (heads, *rows):
        yield "".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
