"""Draws a plan as text: the placement of every unit, what the placements mean, and one step."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from shardwise.measure.report.snapshots import snapshots_of
from shardwise.measure.report.text.fp8_table import fp8_lines
from shardwise.measure.report.text.step_picture import in_words, step_lines, sum_lines
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh, Placement, strategy_of
from shardwise.planner.search.chosen_text import chosen_text
from shardwise.program.rules.context import has_states_on_host
from shardwise.program.spec import ROOT, ModelSpec


def explain_plan(spec: ModelSpec, *, plan: Plan, num_ranks: int) -> list[str]:
    """Draw a plan on a model, 80 columns wide if the names of units are short."""
    mesh = plan.mesh or Mesh(shard=num_ranks)
    step = snapshots_of(spec, plan=plan, num_ranks=num_ranks)
    names = [unit.name for unit in spec.units]
    meanings = []
    for placement in dict.fromkeys(plan.placements(names).values()):
        first, *rest = in_words(placement, num_groups=mesh.replicate)
        across = plan.across_text if placement.optim.is_sharded_across else ""
        meanings += [f"{strategy_of(placement)}{across}: {first}", *(f"  {line}" for line in rest)]
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
        "units": [
            {"name": name, "strategy": row, "recompute": way, "host": host}
            for name, row, way, host in _choices(spec, plan=plan)
        ],
        "peak_bytes": step.peak.held_bytes,
    }


def _choices(spec: ModelSpec, *, plan: Plan) -> list[tuple[str, str, str, list[str]]]:
    """Return (unit, strategy, recompute, what lives in host memory) of each unit."""
    return [
        (name, strategy_of(placement), plan.recompute_of(name), _on_host(name, placement, plan=plan))
        for name, placement in plan.placements(unit.name for unit in spec.units).items()
    ]


def _on_host(name: str, placement: Placement, *, plan: Plan) -> list[str]:
    kinds = {
        "states": has_states_on_host(name, plan=plan, placement=placement),
        "activations": plan.has_activations_on_host(name),
    }
    return [kind for kind, is_there in kinds.items() if is_there]


def _unit_lines(spec: ModelSpec, *, plan: Plan) -> Iterator[str]:
    """Yield one line per run of consecutive units with equal placement, recompute and host memory."""
    rows = []
    for (row, way, host, _), group in groupby(_choices(spec, plan=plan), key=lambda one: (*one[1:], one[0] == ROOT)):
        names = [name for name, *_ in group]
        named = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        rows.append((named, str(len(names)), row, "" if names == [ROOT] else way, ", ".join(host)))
    heads = ("units", "number", "placement", "recompute", "in host memory")
    num_columns = len(heads) if plan.offload_states or plan.offload_activations else len(heads) - 1
    widths = [max(len(line[at]) for line in (heads, *rows)) + 2 for at in range(num_columns)]
    for line in (heads, *rows):
        yield "".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip()
