"""`shardwise doctor`: is this plan file right, and what does it say?"""

from pathlib import Path
from typing import Annotated

import typer

from shardwise.placement import SHARDED, placement_of
from shardwise.plan import Plan


def doctor(path: Annotated[Path, typer.Argument(metavar="PLAN.toml", help="A plan file.")]) -> None:
    """Check a plan file and say who holds what; the first mistake is one line, and the exit code 2."""
    plan = Plan.load(path)
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("units", "strategy", "params", "grads", "optim"):
        table.add_column(column)
    table.add_row("every unit" if not plan.overrides else "every other unit", plan.strategy, *_row(plan.strategy))
    # The last match wins, so the last override is the first that is asked.
    for pattern, strategy in reversed(plan.to_dict()["overrides"].items()):
        table.add_row(pattern, strategy, *_row(strategy))
    console = Console()
    console.print(table)
    mesh = f"mesh {plan.mesh}" if plan.mesh else "all ranks on the shard axis"
    console.print(
        f"{path}: a whole plan: {mesh}, precision {plan.precision}, recompute {plan.recompute}, "
        f"units {plan.units}, engine {plan.engine}" + (f", compile {plan.compile}" if plan.compile != "none" else ""),
        highlight=False,
        markup=False,
    )


def _row(strategy: str) -> tuple[str, str, str]:
    placement = placement_of(strategy)
    kept = "" if placement.reshard_after_forward else ", kept after forward"
    params = "sharded" + kept if placement.params is SHARDED else "replicated"
    return params, placement.grads.value, placement.optim.value
