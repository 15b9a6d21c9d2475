"""`shardwise profile`: measures the memory of one step by category, and compares it with the prediction."""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from shardwise.base.errors import InvalidModel, InvalidPlan
from shardwise.doors.cli.plan_options import check_names, strategies_for_engine
from shardwise.doors.cli.shared_options import (
    AsJson,
    DeviceKind,
    Engine,
    ImageSize,
    Optimizer,
    SampleLength,
    Units,
    device_kind,
)
from shardwise.doors.cli.terminal import check_output, print_line, status_line
from shardwise.plan.patterns import AUTO_UNITS
from shardwise.plan.placement import STRATEGIES

if TYPE_CHECKING:
    from shardwise.measure.profile.compare import Profile
    from shardwise.measure.profile.rehearsal import Rehearsal


def profile(
    model: Annotated[str, Argument(help="A catalogue name, hf:DIR, timm:NAME, python:FILE.py:function.")],
    strategy: Annotated[str, Option(help=f"{', '.join(STRATEGIES)}, or all.")] = "all",
    ranks: Annotated[int, Option(help="Number of ranks in the job; only one of them runs here.")] = 1,
    micro_batch: Annotated[int, Option(help="Samples per rank per pass.")] = 1,
    seq: SampleLength = None,
    image: ImageSize = None,
    precision: Annotated[
        str | None, Option(help="fp32, bf16, fp16 or fp8 (default: bf16 on a GPU, fp32 on a CPU).")
    ] = None,
    recompute: Annotated[str, Option(help="none, full or selective.")] = "none",
    units: Units = AUTO_UNITS,
    optimizer: Optimizer = "adamw",
    engine: Engine = "shardwise",
    device: DeviceKind = None,
    steps: Annotated[int, Option(min=1, help="Timed steps.")] = 3,
    timeline: Annotated[
        bool, Option("--timeline", help="Show the step row by row, also for several strategies.")
    ] = False,
    history: Annotated[
        Path | None, Option(help="Write the GPU allocator's history; https://pytorch.org/memory_viz opens it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure memory and compute time of one rank of a job.

    The other ranks are not started. Memory is shown by category through one step, next to the prediction.
    """
    check_names(optimizer=optimizer)
    if ranks < 1:
        raise InvalidPlan(f"--ranks {ranks}: must be a whole number of at least 1")
    from shardwise.models.catalogue import kind_of

    if kind_of(model)[0] == "params":
        raise InvalidModel(f"{model}: a parameter count cannot be run; shardwise plan predicts its states")
    from shardwise.measure.profile.rehearsal import Rehearsal
    from shardwise.plan import Plan

    where = device_kind(device, on_cpu="runs on the CPU")
    plan = Plan(
        precision=precision or ("bf16" if where == "cuda" else "fp32"),
        recompute=recompute,
        units=units,
        engine=engine,
        micro_batch=micro_batch,
    )
    rehearsal = Rehearsal(
        model=model,
        plan=plan,
        num_ranks=ranks,
        batch=micro_batch,
        seq=seq,
        image=image,
        optimizer=optimizer,
        device=where,
        steps=steps,
        history=None if history is None else str(history),
    )
    chosen = strategies_for_engine(strategy, engine=engine)
    _check_history(history, device=where, strategies=chosen)
    found = _profiles(rehearsal, strategies=chosen)
    if as_json:
        from shardwise.measure.report.text.profile_table import as_data

        print(json.dumps(as_data(found), indent=2))
    else:
        _show(found, timeline=timeline or len(found) == 1)


def _profiles(rehearsal: "Rehearsal", *, strategies: Sequence[str]) -> "list[Profile]":
    from shardwise.measure.profile.compare import profile as profile_all
    from shardwise.measure.profile.rehearsal import Measured, Rehearsal, rehearse_apart
    from shardwise.models.reference import Model

    with status_line("Starting …") as show_status:

        def run(one: Rehearsal) -> Measured:
            show_status(f"Simulating {one.plan.strategy}, rank 0 of {one.num_ranks} …")
            return rehearse_apart(one)

        def while_tracing(name: str) -> AbstractContextManager[None]:
            show_status(f"Tracing {name} …")
            return nullcontext()

        model, seq, image, device = rehearsal.model, rehearsal.seq, rehearsal.image, rehearsal.device
        named = Model(model, seq=seq, image=image, kernels=device, while_tracing=while_tracing)
        each = [replace(rehearsal, plan=rehearsal.plan.under(name)) for name in strategies]
        return profile_all(each, spec_for=named.spec_for, room_bytes=_room_bytes(device), run=run)


def _check_history(path: Path | None, *, device: str, strategies: Sequence[str]) -> None:
    if path is None:
        return
    if device != "cuda":
        raise InvalidPlan(f"--history {path}: only a GPU allocator keeps a history")
    if len(strategies) > 1:
        raise InvalidPlan(f"--history {path}: records one strategy; choose it, such as --strategy fsdp")
    check_output("--history", path)


def _room_bytes(device: str) -> int:
    if device == "cpu":
        from shardwise.hardware.host_memory import free_host_bytes

        return free_host_bytes()
    import torch

    return torch.cuda.mem_get_info()[0]


def _show(found: "Sequence[Profile]", *, timeline: bool) -> None:
    from rich.console import Console

    from shardwise.measure.report.text.plain_table import legend
    from shardwise.measure.report.text.profile_table import as_table, as_timeline, remark

    console = Console()
    print_line(_heading(found))
    console.print(as_table(found))
    for one in found:
        print_line(remark(one))
    for one in found:
        if timeline and one.measured is not None:
            console.print()
            console.print(as_timeline(one))
    if timeline:
        console.print(legend())


def _heading(found: "Sequence[Profile]") -> str:
    rehearsal = found[0].rehearsal
    plan, sizes = rehearsal.plan, ((rehearsal.seq, "tokens"), (rehearsal.image, "pixels"))
    size = "".join(f", {value} {unit}" for value, unit in sizes if value)
    one = "one rank" if rehearsal.num_ranks == 1 else f"rank 0 of {rehearsal.num_ranks:,}, without the others"
    return (
        f"{rehearsal.model} on {rehearsal.device}: {one}; micro-batch {rehearsal.batch}{size}, {plan.precision}, "
        f"recompute {plan.recompute}, {rehearsal.optimizer}, engine {plan.engine}. "
        "Peak in live bytes; times exclude communication."
    )
