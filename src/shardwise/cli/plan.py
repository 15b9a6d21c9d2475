"""`shardwise plan`: what every strategy needs on a cluster, and which one to take."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.errors import InvalidPlan, UnknownName
from shardwise.placement import STRATEGIES

if TYPE_CHECKING:
    from shardwise.planner.search import Candidate
    from shardwise.sources import Source

_GOALS = ("throughput", "memory")
_OPTIMIZERS = ("adamw", "adam", "sgd")


def plan(
    model: Annotated[
        str, typer.Argument(help="A catalogue name, hf:DIR, timm:NAME, params:60b, python:FILE.py:function.")
    ],
    cluster: Annotated[str, typer.Option("--cluster", help="8xh100-80gb, 16x8xa100-40gb@ib-8x200, or a TOML file.")],
    strategy: Annotated[str, typer.Option("--strategy", help=f"{', '.join(STRATEGIES)}, or all.")] = "all",
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", help="Samples a rank and pass; without, the most that fit.")
    ] = None,
    seq: Annotated[int | None, typer.Option("--seq", help="Tokens a sample.")] = None,
    image: Annotated[int | None, typer.Option("--image", help="Pixels an image is wide and high.")] = None,
    precision: Annotated[str, typer.Option("--precision", help="fp32, bf16 or fp16.")] = "bf16",
    recompute: Annotated[str, typer.Option("--recompute", help="none, full or selective.")] = "none",
    optimizer: Annotated[str, typer.Option("--optimizer", help=f"{', '.join(_OPTIMIZERS)}.")] = "adamw",
    goal: Annotated[str, typer.Option("--goal", help="throughput or memory.")] = "throughput",
    engine: Annotated[
        str, typer.Option("--engine", help="shardwise, or torch's own DDP and fully_shard.")
    ] = "shardwise",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    save: Annotated[Path | None, typer.Option("--save", help="Write the recommended plan as PLAN.toml.")] = None,
) -> None:
    """Say what every strategy needs on a cluster: fits or not, bytes by category, and which one to take."""
    _check(strategy=strategy, goal=goal, optimizer=optimizer)
    from shardwise.hardware import cluster_of
    from shardwise.plan import Plan
    from shardwise.planner.search import candidates, recommend, way_out
    from shardwise.sources import Source

    where = cluster_of(cluster)
    asked = Plan(micro_batch=micro_batch, precision=precision, recompute=recompute, engine=engine)
    source = Source(model, seq=seq, image=image, while_tracing=_progress)
    strategies = [name for name in STRATEGIES if strategy in (name, "all") and _runs(name, engine=engine)]
    found = candidates(
        source.spec_for, plan=asked, strategies=strategies, cluster=where, optimizer=optimizer, goal=goal
    )
    recommended, why = recommend(found, goal=goal)
    help_out = None
    if recommended is None and any(candidate.fits == "no" for candidate in found):
        help_out = way_out(source.spec_for, plan=asked, strategies=strategies, cluster=where, optimizer=optimizer)
        why = "nothing fits" + (
            f"; fits with {help_out}"
            if help_out
            else ", also not with --recompute full, --micro-batch 1 and 1,024 times the devices"
        )
    if save is not None:
        if recommended is None:
            raise InvalidPlan(f"--save {save}: {why}")
        found[recommended].plan.save(save)
    if as_json:
        print(json.dumps(_data(model, str(where), found, recommended=recommended, why=why), indent=2))
    else:
        _show(source, found, recommended=recommended, why=why)


def _check(*, strategy: str, goal: str, optimizer: str) -> None:
    if strategy not in (*STRATEGIES, "all"):
        raise UnknownName.of("strategy", strategy, known=(*STRATEGIES, "all"))
    if goal not in _GOALS:
        raise UnknownName.of("goal", goal, known=_GOALS)
    if optimizer not in _OPTIMIZERS:
        raise UnknownName.of("optimizer", optimizer, known=_OPTIMIZERS)


def _runs(strategy: str, *, engine: str) -> bool:
    """torch's own engines have no zero1 and zero2."""
    return engine != "torch" or strategy not in ("zero1", "zero2")


@contextmanager
def _progress(name: str) -> Iterator[None]:
    """A line on a terminal while a model is traced."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(f"Tracing {name} …"):
        yield


def _data(model: str, cluster: str, found: "list[Candidate]", *, recommended: int | None, why: str) -> dict[str, Any]:
    from shardwise.report.costs import as_data

    return {
        "model": model,
        "cluster": cluster,
        "recommended": recommended,
        "why": why,
        "candidates": [as_data(candidate) for candidate in found],
    }


def _show(source: "Source", found: "list[Candidate]", *, recommended: int | None, why: str) -> None:
    from rich.console import Console

    from shardwise.report.costs import as_table, legend

    console = Console()
    first = found[0]
    capacity = first.capacity_bytes
    seq = f", {first.seq} tokens a sample" if first.seq else ""
    room = f"{capacity / 2**30:.1f} GiB each" if capacity else "capacity unknown"
    console.print(
        f"{source.reference} on {first.cluster} ({room}): {first.plan.precision}, recompute "
        f"{first.plan.recompute}{seq}, engine {first.plan.engine}",
        highlight=False,
        markup=False,
    )
    console.print(as_table(found, recommended=recommended))
    console.print(legend())
    if not first.memory.activations_known:
        console.print("States only: activations are unknown, and come on top.", highlight=False)
    label = f"Recommended: {found[recommended].plan.strategy}, {why}." if recommended is not None else f"{why}."
    console.print(label[0].upper() + label[1:], highlight=False, markup=False, soft_wrap=True)
    band = round(100 * first.error_band)
    console.print(f"Predicted, not measured; fits means peak + {band}% ≤ capacity.", highlight=False)
