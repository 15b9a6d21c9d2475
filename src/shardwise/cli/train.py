"""`shardwise train`: train on this machine's devices, or be one rank of a job that torchrun or SLURM started."""

from pathlib import Path
from typing import Annotated

import typer

from shardwise.train.config import TrainConfig, load_config
from shardwise.train.config_section import InvalidConfig


def train(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.toml", help="What to train, on which data, and how (docs/train.md).")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="section.key=value", help="Override one key of CONFIG; may be repeated."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="A plan that replaces CONFIG's (`shardwise plan --save`).")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option("--strategy", help="ddp, zero1, zero2, shard_grad_op, fsdp or auto.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="The run folder (default: run.folder, or runs/CONFIG).")
    ] = None,
    num_ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, help="Ranks to start here (default: the plan's mesh, or one per GPU)."),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="How many times to restart the ranks after one dies.")
    ] = 3,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start from step 0 and remove the checkpoints in the run folder.")
    ] = False,
    replan: Annotated[
        bool,
        typer.Option("--replan", help="Choose the plan again, for the devices there are now, and resume under it."),
    ] = False,
) -> None:
    """Train a model; rerun the same command to resume."""
    chosen = load_config(config, settings=settings or (), plan=plan, strategy=strategy, folder=run)
    arguments = ["train", str(config), *(part for setting in settings or () for part in ("--set", setting))]
    for option, value in (("--plan", plan), ("--strategy", strategy), ("--run", run)):
        arguments += [option, str(value)] if value is not None else []
    arguments += ["--fresh"] if fresh else []
    arguments += ["--replan"] if replan else []
    from shardwise.comm.job_environment import is_rank

    if is_rank():
        from shardwise.train.rank_run import train as train_as_rank

        train_as_rank(chosen, fresh=fresh, replan=replan, command=("shardwise", *arguments))
        return
    # Replanned, the mesh is chosen again, too.
    count = ranks_to_start(chosen, asked=num_ranks, by_mesh=not replan)
    print(f"Starting {count} {'rank' if count == 1 else 'ranks'} on this machine …", flush=True)
    from shardwise.launch.launch import launch

    code = launch(
        arguments,
        num_ranks=count,
        max_restarts=max_restarts,
        folder=chosen.folder,
        grace_seconds=chosen.checkpoint.grace_seconds,
    )
    raise typer.Exit(code)


def ranks_to_start(config: TrainConfig, *, asked: int | None, by_mesh: bool = True) -> int:
    """As asked, as the plan's mesh has, or one for each GPU; on the CPU one."""
    import torch

    mesh = config.plan.mesh if by_mesh else None
    num_gpus = torch.cuda.device_count() if config.run.device != "cpu" else 0
    if config.run.device == "cuda" and num_gpus == 0:
        raise InvalidConfig("run.device = 'cuda': this machine has no GPU that torch can use; set it to auto or cpu")
    chosen = asked or (mesh.num_ranks if mesh is not None else max(1, num_gpus))
    if mesh is not None:
        mesh.check_ranks(chosen)
    if num_gpus and chosen > num_gpus:
        raise InvalidConfig(f"{chosen} ranks on {num_gpus} GPUs: --ranks {num_gpus}, or --set run.device=cpu")
    return chosen
