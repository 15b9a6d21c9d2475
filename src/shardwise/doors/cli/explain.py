"""`shardwise explain`: draws one step, or the ring, as text."""

import json
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from shardwise.base.errors import InvalidPlan, UnknownName
from shardwise.doors.cli.shared_options import AsJson, Units
from shardwise.doors.cli.terminal import status_line
from shardwise.plan.patterns import AUTO_UNITS
from shardwise.plan.placement import ACROSS, STRATEGIES, Mesh, resolve_strategy

if TYPE_CHECKING:
    from shardwise.plan import Plan
    from shardwise.program.spec import ModelSpec


def explain(
    strategy: Annotated[str | None, Argument(help=f"{', '.join(STRATEGIES)}; ring; or PLAN.toml.")] = None,
    ranks: Annotated[int, Option(help="Number of ranks.")] = 4,
    replicate: Annotated[int, Option(help="Groups of ranks that each hold all slices (hybrid sharding).")] = 1,
    across: Annotated[str, Option(help="Strategy over those groups: ddp, zero1 or zero2.")] = ACROSS[0],
    model: Annotated[str | None, Option(help="A model of the catalogue (default: three equal blocks).")] = None,
    units: Units = AUTO_UNITS,
    prefetch: Annotated[int, Option(help="Units gathered ahead of the one that computes.")] = 1,
    ring: Annotated[bool, Option("--ring", help="The ring all-reduce, chunk by chunk.")] = False,
    as_json: AsJson = False,
) -> None:
    """Draw one training step and what each rank holds in it."""
    if ranks < 1:
        raise InvalidPlan(f"--ranks {ranks}: must be a whole number of at least 1")
    if replicate < 1 or ranks % replicate:
        raise InvalidPlan(f"--replicate {replicate}: must be a whole number that divides the {ranks} ranks")
    known = (*STRATEGIES, "ring")
    if strategy is None and not ring:
        raise InvalidPlan(f"explain needs a strategy: {', '.join(known)}")
    if strategy is not None and strategy.endswith(".toml") and not ring:
        _explain_file(strategy, model=model, ranks=ranks, as_json=as_json)
        return
    if strategy is not None:
        strategy = resolve_strategy(strategy, replicate=replicate)
    if strategy is not None and strategy not in known:
        raise UnknownName.of("strategy", strategy, known=known)
    if ring or strategy is None or strategy == "ring":
        from shardwise.measure.report.text.ring_rounds import explain_ring, ring_as_data

        _show(ring_as_data(num_ranks=ranks) if as_json else explain_ring(num_ranks=ranks))
        return
    from shardwise.measure.report.text.step_picture import explain as explain_step
    from shardwise.measure.report.text.step_picture import explain_as_data
    from shardwise.plan import Plan

    mesh = Mesh(replicate=replicate, shard=ranks // replicate)
    drawn = explain_as_data if as_json else explain_step
    plan = Plan(strategy=strategy, across=across, mesh=mesh, units=units, prefetch=prefetch)
    _show(drawn(_spec(model, plan=plan), plan=plan))


def _explain_file(path: str, *, model: str | None, ranks: int, as_json: bool) -> None:
    """Explain a plan file on the model that it was made for; its mesh, if it has one, gives the number of ranks."""
    from shardwise.measure.report.text.plan_picture import explain_plan, plan_as_data
    from shardwise.plan import Plan

    plan = Plan.load(path)
    per_unit = [plan.overrides, plan.recompute_overrides, plan.offload_states, plan.offload_activations]
    if model is None and any(one is not True and one for one in per_unit):
        raise InvalidPlan(f"{path} names single units: give their model with --model")
    drawn = plan_as_data if as_json else explain_plan
    _show(drawn(_spec(model, plan=plan), plan=plan, num_ranks=plan.mesh.num_ranks if plan.mesh is not None else ranks))


def _spec(model: str | None, *, plan: "Plan") -> "ModelSpec":
    from shardwise.measure.report.text.step_picture import picture_model
    from shardwise.models.reference import Model

    if model is None and plan.units != AUTO_UNITS:
        raise InvalidPlan(f"units = {plan.units!r}: name the model that is cut with --model")
    if model is None:
        return picture_model()
    named = Model(model, while_tracing=lambda name: status_line(f"Tracing {name} …"))
    return named.spec_for(plan) if plan.units != AUTO_UNITS else named.spec_for()


def _show(drawn: "list[str] | dict[str, Any]") -> None:
    """Print data as JSON, and lines; on a terminal with colours, computation and communication are highlighted."""
    if isinstance(drawn, dict):
        print(json.dumps(drawn, indent=2, ensure_ascii=False))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for line in drawn:
        text = Text(line)
        text.highlight_regex(r"^ (forward|backward|update) \S+", "bold")
        text.highlight_regex(r"░|(?<= )[+=][a-zΣ\d]+", "yellow")
        text.highlight_regex(r"▒", "magenta")
        text.highlight_regex(r"◀", "bold red")
        console.print(text, soft_wrap=True)
