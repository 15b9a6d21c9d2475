"""`shardwise bench`: compares strategies and engines on the same training, and checks that their losses match."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from shardwise.base.errors import InvalidCluster, ShardwiseError
from shardwise.doors.cli.plan_options import comma_separated, expand_all, strategy_names
from shardwise.doors.cli.shared_options import AsJson, RanksHere, Settings, option_words
from shardwise.doors.cli.train import ranks_to_start
from shardwise.plan.placement import STRATEGIES
from shardwise.training.config.config import TrainConfig, load_config
from shardwise.training.config.config_section import InvalidConfig

if TYPE_CHECKING:
    from shardwise.measure.bench.benchmark import Asked, OnProgress
    from shardwise.measure.bench.case import Case
    from shardwise.measure.bench.results import Bench

_WIDTH_OF_FILES = 120


def bench(
    config: Annotated[Path, Argument(metavar="CONFIG.toml", help="What to train, as for `shardwise train`.")],
    strategy: Annotated[str, Option(help=f"One or more of {','.join(STRATEGIES)}; all; or all,auto.")] = "all",
    engines: Annotated[
        str,
        Option(
            help="One or more of shardwise, captured, compiled, torch, torch-captured, torch-compiled, accelerate, "
            "lightning, megatron-fsdp, megatron-fsdp-captured, deepspeed, or all.",
        ),
    ] = "shardwise",
    num_ranks: RanksHere = None,
    rounds: Annotated[int, Option(min=1, help="How many times each case is run.")] = 3,
    steps: Annotated[int, Option(min=1, help="Steps that are timed in each run.")] = 20,
    warm_up: Annotated[int, Option(min=1, help="Untimed steps before the timed ones.")] = 5,
    out: Annotated[Path | None, Option(metavar="DIR", help="Output folder (default: bench/CONFIG).")] = None,
    name: Annotated[str | None, Option(help="The bench's title (default: CONFIG's name).")] = None,
    settings: Settings = None,
    cluster: Annotated[
        str | None, Option(help="This machine in the terms of `shardwise plan`, to predict times.")
    ] = None,
    devices: Annotated[Path | None, Option(help="A device table that `shardwise calibrate` wrote here.")] = None,
    keep_going: Annotated[bool, Option("--keep-going", help="Keep timing even if the losses do not match.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the bench that DIR holds.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare strategies and engines on the same training job.

    Each case runs in fresh processes, one after the other. Shows speed and memory, whether the losses match, and
    which one to use.
    """
    from shardwise.measure.bench.benchmark import Asked, check

    chosen = load_config(config, settings=settings or ())
    count = ranks_to_start(chosen, asked=num_ranks)
    options: dict[str, object] = {
        "--strategy": strategy,
        "--engines": engines,
        "--ranks": count,
        "--rounds": rounds,
        "--steps": steps,
        "--warm-up": warm_up,
        "--out": out,
        "--name": name,
        "--cluster": cluster,
        "--devices": devices,
    }
    repeated = [word for setting in settings or () for word in ("--set", setting)]
    asked = Asked(
        config=chosen,
        cases=_cases(chosen, engines=engines, strategies=strategy),
        num_ranks=count,
        folder=out or Path("bench", config.stem),
        name=name or config.stem,
        command=shlex.join(["shardwise", "bench", str(config), *option_words(options), *repeated]),
        rounds=rounds,
        warm_up=warm_up,
        steps=steps,
        keep_going=keep_going,
        overwrite=overwrite,
    )
    check(asked)
    raise Exit(_run(_predicted(asked, cluster=cluster, devices=devices), as_json=as_json))


def _cases(config: TrainConfig, *, engines: str, strategies: str) -> "list[Case]":
    from shardwise.measure.bench.case import cases_of
    from shardwise.measure.bench.contestants import ENGINES

    if config.plan.micro_batch is None:
        raise InvalidConfig("plan.micro_batch is missing: all cases of a bench take equally many samples per pass")
    return cases_of(
        config,
        engines=expand_all(comma_separated(engines), text=engines, kind="engine", known=list(ENGINES)),
        strategies=strategy_names(strategies, mesh=config.plan.mesh),
    )


def _predicted(asked: "Asked", *, cluster: str | None, devices: Path | None) -> "Asked":
    """Add the planner's predictions of the cases and of more devices; if there are none, standard error says why."""
    from shardwise.hardware.host_here import probed_cluster
    from shardwise.measure.bench.modes import is_ours
    from shardwise.measure.bench.prediction import PLANNED_ENGINES, cluster_here, forecast_of
    from shardwise.measure.report.text.costs import scaling_data
    from shardwise.planner.time.compute import can_time

    title, capacity_bytes = _device(asked.config)
    device = "cpu" if title == "cpu" else "cuda"
    here = cluster_here(
        num_ranks=asked.num_ranks,
        device=device,
        title=title,
        cluster=cluster,
        devices=None if devices is None else str(devices),
    )
    if can_time(here.device):
        try:
            here = probed_cluster(here)
        except InvalidCluster as error:
            print(f"the speed of the host is assumed: {error}", file=sys.stderr)
    forecast = forecast_of(asked.config, cluster=here, device=device)
    scaling: list[dict[str, Any]] = []
    try:
        for case in asked.cases:
            if case.plan.is_auto and not case.why_not:
                case.plan = forecast.solved(case.plan)
            if case.engine in PLANNED_ENGINES and not case.why_not:
                case.predicted = forecast.of(case.plan)
        shown = [case for case in asked.cases if is_ours(case.engine) and case.strategy in STRATEGIES]
        ours = [case.strategy for case in shown if not case.why_not]
        scaling = scaling_data(forecast.scaled(asked.config.plan, strategies=ours)) if ours else []
    except ShardwiseError as error:
        for case in asked.cases:
            if case.plan.is_auto:
                case.why_not = case.why_not or f"no plan could be chosen: {error}"
        print(f"nothing is predicted: {error}", file=sys.stderr)
    return replace(asked, capacity_bytes=capacity_bytes, scaling=tuple(scaling))


def _device(config: TrainConfig) -> tuple[str, int | None]:
    """Return the driver's name of the ranks' device and its memory; ("cpu", None) on the CPU.

    A separate process asks the driver, because this one would then hold a part of the first GPU's memory.
    """
    import torch

    if config.run.device == "cpu" or torch.cuda.device_count() == 0:
        return "cpu", None
    code = "import json, torch; p = torch.cuda.get_device_properties(0); print(json.dumps([p.name, p.total_memory]))"
    answer = subprocess.run([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    name, num_bytes = json.loads(answer.stdout.splitlines()[-1])
    return name, num_bytes


def _run(asked: "Asked", *, as_json: bool) -> int:
    """Run and show the bench; the exit code is 1 if a case failed (also without communication) or cannot be ranked."""
    from shardwise.measure.bench.benchmark import BenchStopped
    from shardwise.measure.bench.benchmark import bench as run_all
    from shardwise.measure.bench.results import FILE

    path = asked.folder / FILE
    try:
        with _progress() as on_progress:
            found = run_all(asked, on_progress=on_progress)
    except BenchStopped as end:
        print(f"{end}: the results so far are in {path}", file=sys.stderr)
        return 128 + end.number
    if as_json:
        print(json.dumps(found.to_data(), indent=1, allow_nan=False))
    else:
        _show(found)
        print(f"\n{path}\nnext: {shlex.join(('shardwise', 'report', str(asked.folder)))}")
    failed = any(case.failed or case.why_not_silent for case in asked.cases)
    return 1 if failed or not found.equivalence.agrees else 0


@contextmanager
def _progress() -> "Iterator[OnProgress]":
    """Report progress on standard error: a bar with the remaining time on a terminal, else one line per run."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total, text: print(f"{done}/{total} {text}", file=sys.stderr, flush=True)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=text)


def _show(found: "Bench") -> None:
    from rich.console import Console

    from shardwise.measure.report.text.comparison import as_table, heading, peak_table, remarks

    console = Console()
    if not console.is_terminal:
        # In a file or a log, names need not be wrapped.
        console.width = max(console.width, _WIDTH_OF_FILES)
    console.print(heading(found), highlight=False, markup=False, soft_wrap=True)
    if found.ran:
        console.print(as_table(found))
        peaks = peak_table(found)
        if peaks is not None:
            for part in ("", peaks, ""):
                console.print(part)
    for line in remarks(found):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
