"""The cost of the checks as benchmarks/check_cost.py measured it → a section of the page."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from reliability.page import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def cost_section(paths: Iterable[Path] = ()) -> str:
    """A table for each result; all that there are, by default."""
    tables = [_table(path) for path in paths or sorted(RESULTS.glob("check_cost_*.json"))]
    return "\n\n".join(tables) if tables else "Not measured."


def _table(path: Path) -> str:
    result = json.loads(path.read_bytes())
    machine = result["machine"]
    where = machine["gpu"] or f"{machine['processor']}, {machine['cores']} cores"
    title = (
        f"{where}, load {machine['load_average'][0]:.0f} at the start, torch {result['versions']['torch']} "
        f"([results](../benchmarks/results/{path.name})):"
    )
    lines = ["| case | ms per step | on / off | time inside the checks |", "|---|---|---|---|"]
    return "\n".join([title, "", *lines, *(_row(name, case) for name, case in result["cases"].items())])


def _row(name: str, case: dict[str, Any]) -> str:
    blocks, inside = case["share_by_blocks"], case["share_inside"]
    return (
        f"| `{name}` | {1000 * case['step_seconds']['median']:.1f} "
        f"| {blocks['median']:+.2%} [{blocks['low']:+.2%}, {blocks['high']:+.2%}] "
        f"| {inside['median']:.2%} [{inside['q1']:.2%}, {inside['q3']:.2%}] |"
    )
