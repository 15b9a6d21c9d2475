"""`shardwise plan`: what every strategy needs on a cluster, how fast it is, and which one to take."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.strategies import asked_strategies
from shardwise.errors import InvalidPlan, UnknownName
from shardwise.placement import STRATEGIES
from shardwise.quantities import GIB, fixed_text

if TYPE_CHECKING:
    from shardwise.hardware import Cluster
    from shardwise.planner.search.candidates import Candidate
    from shardwise.planner.search.recommend import Recommendation
    from shardwise.planner.search.scale import Scaled
    from shardwise.sources import Source
    from shardwise.span import Span

_GOALS = ("throughput", "memory")
_OPTIMIZERS = ("adamw", "adam", "sgd")


def plan(
    model: Annotated[
        str, typer.Argument(help="A catalogue name, hf:DIR, timm:NAME, params:60b, python:FILE.py:function.")
    ],
    cluster: Annotated[str, typer.Option("--cluster", help="8xh100-80gb, 16x8xa100-40gb@ib-8x200, or a TOML file.")],
    strategy: Annotated[str, typer.Option("--strategy", help=f"{', '.join(STRATEGIES)}, or all.")] = "all",
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", help="Samples per rank per pass (default: the most that fit).")
    ] = None,
    seq: Annotated[int | None, typer.Option("--seq", help="Tokens per sample.")] = None,
    image: Annotated[int | None, typer.Option("--image", help="Width and height of an image in pixels.")] = None,
    precision: Annotated[str, typer.Option("--precision", help="fp32, bf16 or fp16.")] = "bf16",
    recompute: Annotated[str, typer.Option("--recompute", help="none, full or selective.")] = "none",
    optimizer: Annotated[str, typer.Option("--optimizer", help=f"{', '.join(_OPTIMIZERS)}.")] = "adamw",
    goal: Annotated[str, typer.Option("--goal", help="throughput or memory.")] = "throughput",
    engine: Annotated[
        str, typer.Option("--engine", help="shardwise, or torch's own DDP and fully_shard.")
    ] = "shardwise",
    devices: Annotated[
        Path | None, typer.Option("--devices", help="A device table that `shardwise calibrate` wrote.")
    ] = None,
    software: Annotated[
        str | None, typer.Option("--software", help="How old the kernels are: 2023, 2024, current (default: current).")
    ] = None,
    matmul_precision: Annotated[
        str | None,
        typer.Option("--matmul-precision", help="As torch.set_float32_matmul_precision: highest, or high for TF32."),
    ] = None,
    compile_with: Annotated[str, typer.Option("--compile", help="none, inductor or aot_eager.")] = "none",
    like: Annotated[
        str, typer.Option("--like", help="Time the same strategies as another engine runs them: deepspeed.")
    ] = "",
    here: Annotated[
        bool, typer.Option("--here", help="The devices are of this machine: measure its host, which takes seconds.")
    ] = False,
    scale: Annotated[bool, typer.Option("--scale", help="Also show the best plan on 8 to 16,384 devices.")] = False,
    timeline: Annotated[bool, typer.Option("--timeline", help="Also show what each queue does in a step.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    save: Annotated[Path | None, typer.Option("--save", help="Write the recommended plan as PLAN.toml.")] = None,
) -> None:
    """Say what every strategy needs on a cluster: fits or not, bytes by category, time, and which one to take."""
    _check(goal=goal, optimizer=optimizer)
    from shardwise.plan import Plan
    from shardwise.planner.search.candidates import candidates, way_out
    from shardwise.planner.search.recommend import Reason, recommend
    from shardwise.planner.search.scale import scaling
    from shardwise.report.text.verdict import no_fit, reasons
    from shardwise.sources import Source

    where = _cluster(cluster, devices=devices, software=software, matmul_precision=matmul_precision, here=here)
    asked = Plan(micro_batch=micro_batch, precision=precision, recompute=recompute, engine=engine, compile=compile_with)
    strategies = asked_strategies(strategy, engine=engine)
    source = Source(model, seq=seq, image=image, while_tracing=_progress)
    found = candidates(
        source.spec_for,
        plan=asked,
        strategies=strategies,
        cluster=where,
        optimizer=optimizer,
        goal=goal,
        foreign=like.lower(),
    )
    chosen = recommend(found, goal=goal, spec_for=source.spec_for, optimizer=optimizer)
    why = reasons(chosen)
    if chosen.reason is Reason.NOTHING_FITS:
        way = way_out(source.spec_for, plan=asked, strategies=strategies, cluster=where, optimizer=optimizer)
        why = no_fit(way, asked=asked, strategies=strategies, cluster=where)
    if save is not None:
        if chosen.best is None:
            raise InvalidPlan(f"--save {save}: {why}")
        chosen.best.plan.save(save)
    grown = None
    if scale:
        grown = scaling(source.spec_for, plan=asked, found=found, cluster=where, optimizer=optimizer)
    shown = Shown(
        source=source,
        found=found,
        recommendation=chosen,
        why=why,
        optimizer=optimizer,
        timeline=timeline,
        scaling=grown,
    )
    if as_json:
        print(json.dumps(_data(shown), indent=2))
    else:
        _show(shown)
    if chosen.reason is Reason.NOTHING_FITS:
        # So that a script does not go on with a plan that is none.
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What is to be shown."""

    source: "Source"
    found: "list[Candidate]"
    recommendation: "Recommendation"
    why: str
    optimizer: str
    timeline: bool
    scaling: "list[Scaled] | None"

    def spans(self) -> "list[Span] | None":
        """The step of the recommended plan, if it is asked for and known."""
        from shardwise.planner.time.step_time import timeline

        best = self.recommendation.best
        if not self.timeline or best is None or best.time is None:
            return None
        spec = self.source.spec_for(best.plan)
        return timeline(spec, plan=best.plan, cluster=best.cluster, optimizer=self.optimizer)


def _cluster(
    text: str, *, devices: Path | None, software: str | None, matmul_precision: str | None, here: bool
) -> "Cluster":
    from shardwise.hardware import cluster_of
    from shardwise.hardware.cluster_file import read_cluster_file
    from shardwise.hardware.host_here import probed_cluster

    cluster = cluster_of(text)
    if devices is not None:
        measured = read_cluster_file(devices)
        cluster = replace(cluster, device=measured.device, link=measured.link or cluster.link)
    device = replace(
        cluster.device,
        software=software or cluster.device.software,
        matmul_precision=matmul_precision or cluster.device.matmul_precision,
    )
    cluster = replace(cluster, device=device)
    return probed_cluster(cluster) if here else cluster


def _check(*, goal: str, optimizer: str) -> None:
    if goal not in _GOALS:
        raise UnknownName.of("goal", goal, known=_GOALS)
    if optimizer not in _OPTIMIZERS:
        raise UnknownName.of("optimizer", optimizer, known=_OPTIMIZERS)


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


def _data(shown: Shown) -> dict[str, Any]:
    from shardwise.hardware.host_here import host_is_probed
    from shardwise.report.text.costs import as_data, scaling_data
    from shardwise.report.text.queue_lanes import as_data as spans_as_data

    data = {
        "model": shown.source.reference,
        "cluster": str(shown.found[0].cluster),
        "recommended": shown.recommendation.index,
        "why": shown.why,
        "host": "probed" if host_is_probed(shown.found[0].cluster.device) else "assumed",
        "candidates": [as_data(candidate) for candidate in shown.found],
    }
    if shown.scaling is not None:
        data["scaling"] = scaling_data(shown.scaling)
    spans = shown.spans()
    if spans is not None:
        data["timeline"] = spans_as_data(spans)
    return data


def _show(shown: Shown) -> None:
    from rich.console import Console

    from shardwise.report.text.costs import as_table, legend, scaling_table
    from shardwise.report.text.queue_lanes import as_lanes

    console = Console()
    console.print(_heading(shown), highlight=False, markup=False)
    console.print(as_table(shown.found, recommended=shown.recommendation.index))
    console.print(legend())
    spans = shown.spans()
    if spans is not None:
        console.print(as_lanes(spans), highlight=False, markup=False)
    if shown.scaling is not None:
        console.print(scaling_table(shown.scaling))
    for line in _remarks(shown):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _heading(shown: Shown) -> str:
    first = shown.found[0]
    capacity, plan = first.capacity_bytes, first.plan
    seq = f", {first.seq} tokens a sample" if first.seq else ""
    room = f"{fixed_text(capacity, unit=GIB)} each" if capacity else "capacity unknown"
    return (
        f"{shown.source.reference} on {first.cluster} ({room}): {plan.precision}, recompute {plan.recompute}{seq}, "
        f"engine {plan.engine}"
    )


def _remarks(shown: Shown) -> Iterator[str]:
    from shardwise.hardware.host_here import host_is_probed
    from shardwise.planner.time.step_time import why_not_timed
    from shardwise.report.text.verdict import verdict

    first = shown.found[0]
    if not first.memory.activations_known:
        yield "States only: activations are unknown, and come on top."
    yield verdict(shown.recommendation, why=shown.why)
    fits = f"fits means peak + {first.memory_band:.0%} ≤ capacity"
    unknown = why_not_timed(shown.source.spec_for(first.plan), plan=first.plan, cluster=first.cluster)
    shown_first = shown.recommendation.best or first
    time = f"time is not predicted: {unknown}" if unknown else f"time {shown_first.time_band}, of it comm exposed"
    yield f"Predicted, not measured; {fits}; {time}."
    if unknown is None and not host_is_probed(first.cluster.device):
        yield "The host is assumed: where the CPU bounds a step, --here on the machine itself measures how fast it is."
    if shown.scaling is not None:
        yield (
            "Scaling: a strategy keeps its micro-batch, so the global batch grows; with the wait for the slowest node, "
            "without the allocator's model and congestion."
        )
