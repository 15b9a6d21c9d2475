"""`shardwise profile`: the memory of one step, by category, measured here and compared with the prediction."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.strategies import asked_strategies
from shardwise.errors import InvalidCluster, InvalidData, InvalidModel, InvalidPlan, UnknownName
from shardwise.plan.placement import STRATEGIES

if TYPE_CHECKING:
    from shardwise.profile.compare import Profile
    from shardwise.profile.rehearsal import Rehearsal

_OPTIMIZERS = ("adamw", "adam", "sgd", "muon")


def profile(
    model: Annotated[str, typer.Argument(help="A catalogue name, hf:DIR, timm:NAME, python:FILE.py:function.")],
    strategy: Annotated[str, typer.Option("--strategy", help=f"{', '.join(STRATEGIES)}, or all.")] = "all",
    ranks: Annotated[int, typer.Option("--ranks", help="Number of ranks in the job; only one of them runs here.")] = 1,
    micro_batch: Annotated[int, typer.Option("--micro-batch", help="Samples per rank per pass.")] = 1,
    seq: Annotated[int | None, typer.Option("--seq", help="Tokens per sample.")] = None,
    image: Annotated[int | None, typer.Option("--image", help="Width and height of an image in pixels.")] = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="fp32, bf16 or fp16 (default: bf16 on a GPU, fp32 on a CPU).")
    ] = None,
    recompute: Annotated[str, typer.Option("--recompute", help="none, full or selective.")] = "none",
    optimizer: Annotated[str, typer.Option("--optimizer", help=f"{', '.join(_OPTIMIZERS)}.")] = "adamw",
    engine: Annotated[
        str, typer.Option("--engine", help="shardwise, or torch's own DDP and fully_shard.")
    ] = "shardwise",
    device: Annotated[
        str | None, typer.Option("--device", help="cuda or cpu (default: cuda if there is a GPU).")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed steps.")] = 3,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Show the step row by row, also for several strategies.")
    ] = False,
    history: Annotated[
        Path | None,
        typer.Option("--history", help="Write the GPU allocator's history; https://pytorch.org/memory_viz opens it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Measure memory and compute time of one rank of a job.

    The other ranks are not started. Memory is shown by category through one step, next to the prediction.
    """
    _check(model, ranks=ranks, optimizer=optimizer)
    from shardwise.plan import Plan
    from shardwise.profile.rehearsal import Rehearsal

    where = _device(device)
    plan = Plan(
        precision=precision or ("bf16" if where == "cuda" else "fp32"),
        recompute=recompute,
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
    chosen = asked_strategies(strategy, engine=engine)
    _check_history(history, device=where, strategies=chosen)
    found = _profiles(rehearsal, strategies=chosen)
    if as_json:
        from shardwise.report.text.profile_table import as_data

        print(json.dumps(as_data(found), indent=2))
    else:
        _show(found, timeline=timeline or len(found) == 1)


def _profiles(rehearsal: "Rehearsal", *, strategies: Sequence[str]) -> "list[Profile]":
    from shardwise.profile.compare import profile as profile_all
    from shardwise.profile.rehearsal import Measured, Rehearsal, rehearse_apart
    from shardwise.sources import Source

    with _progress() as tell:

        def run(one: Rehearsal) -> Measured:
            tell(f"Rehearsing {one.plan.strategy}, rank 0 of {one.num_ranks} …")
            return rehearse_apart(one)

        def tracing(name: str) -> AbstractContextManager[None]:
            tell(f"Tracing {name} …")
            return nullcontext()

        source = Source(
            rehearsal.model,
            seq=rehearsal.seq,
            image=rehearsal.image,
            kernels=rehearsal.device,
            while_tracing=tracing,
        )
        each = [replace(rehearsal, plan=replace(rehearsal.plan, strategy=name)) for name in strategies]
        return profile_all(each, spec_for=source.spec_for, room_bytes=_room_bytes(rehearsal.device), run=run)


def _check(model: str, *, ranks: int, optimizer: str) -> None:
    if optimizer not in _OPTIMIZERS:
        raise UnknownName.of("optimizer", optimizer, known=_OPTIMIZERS)
    if ranks < 1:
        raise InvalidPlan(f"--ranks {ranks}: must be a whole number of at least 1")
    if model.startswith("params:"):
        raise InvalidModel(f"{model}: a parameter count cannot be run; shardwise plan predicts its states")


def _device(asked: str | None) -> str:
    import torch

    if asked not in (None, "cuda", "cpu"):
        raise InvalidCluster(f"--device {asked}: must be cuda or cpu")
    if asked == "cuda" and not torch.cuda.is_available():
        raise InvalidCluster("--device cuda: torch finds no GPU here; --device cpu runs on the CPU")
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def _check_history(path: Path | None, *, device: str, strategies: Sequence[str]) -> None:
    if path is None:
        return
    if device != "cuda":
        raise InvalidPlan(f"--history {path}: only a GPU allocator keeps a history")
    if len(strategies) > 1:
        raise InvalidPlan(f"--history {path}: records one strategy; choose it, such as --strategy fsdp")
    if not path.absolute().parent.is_dir():
        raise InvalidData(f"--history {path}: there is no folder {path.parent}")


def _room_bytes(device: str) -> int:
    if device == "cpu":
        from shardwise.profile.compare import host_room_bytes

        return host_room_bytes()
    import torch

    return torch.cuda.mem_get_info()[0]


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line on a terminal that says what is being done."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("Starting …") as status:
        yield status.update


def _show(found: "Sequence[Profile]", *, timeline: bool) -> None:
    from rich.console import Console

    from shardwise.report.text.category_bars import legend
    from shardwise.report.text.profile_table import as_table, as_timeline, remark

    console = Console()
    console.print(_heading(found), highlight=False, markup=False, soft_wrap=True)
    console.print(as_table(found))
    for one in found:
        console.print(remark(one), highlight=False, markup=False, soft_wrap=True)
    for one in found:
        if timeline and one.measured is not None:
            console.print()
            console.print(as_timeline(one))
    if timeline:
        console.print(legend())


def _heading(found: "Sequence[Profile]") -> str:
    rehearsal = found[0].rehearsal
    plan, size = (
        rehearsal.plan,
        "".join(
            f", {value} {what}" for value, what in ((rehearsal.seq, "tokens"), (rehearsal.image, "pixels")) if value
        ),
    )
    one = "one rank" if rehearsal.num_ranks == 1 else f"rank 0 of {rehearsal.num_ranks:,}, without the others"
    return (
        f"{rehearsal.model} on {rehearsal.device}: {one}; micro-batch {rehearsal.batch}{size}, {plan.precision}, "
        f"recompute {plan.recompute}, {rehearsal.optimizer}, engine {plan.engine}. "
        "Peak in live bytes; times exclude communication."
    )
