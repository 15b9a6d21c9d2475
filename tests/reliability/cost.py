"""The cost of the checks as benchmarks/check_cost.py measured it → a section of the page."""

import json
from pathlib import Path
from typing import Any

from reliability.page import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "check_cost.json"


def cost_section(path: Path = RESULTS) -> str:
    """A table for each kind of device."""
    return "\n\n".join(_table(result, name=path.name) for result in json.loads(path.read_bytes()).values())


def _table(result: dict[str, Any], *, name: str) -> str:
    machine = result["machine"]
    where = machine["gpu"] or f"{machine['processor']}, {machine['cores']} cores"
    title = (
        f"{where}, load {machine['load_average'][0]:.0f} at the start, torch {result['versions']['torch']} "
        f"([results](../benchmarks/results/{name})):"
    )
    lines = ["| case | ms per step | on / off | time inside the checks |", "|---|---|---|---|"]
    return "\n".join([title, "", *lines, *(_row(case_name, case) for case_name, case in result["cases"].items())])


def _row(name: str, case: dict[str, Any]) -> str:
    blocks, inside = case["share_by_blocks"], case["share_inside"]
    return (
        f"| `{name}` | {1000 * case['step_seconds']['median']:.1f} "
        f"| {blocks['median']:+.2%} [{blocks['low']:+.2%}, {blocks['high']:+.2%}] "
        f"| {inside['median']:.2%} [{inside['q1']:.2%}, {inside['q3']:.2%}] |"
    )
