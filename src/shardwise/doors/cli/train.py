"""`shardwise train`: trains on this machine's devices, or as one rank of a job that torchrun or SLURM started."""

import os
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from shardwise.base.files.keys import reference
from shardwise.doors.cli.shared_options import RanksHere, Settings, option_words
from shardwise.training.config.config import SECTIONS, TrainConfig, load_config
from shardwise.training.config.config_section import InvalidConfig


def _print_keys(asked: bool) -> None:
    if asked:
        for section, kind in SECTIONS.items():
            print(f"[{section}]")
            for name, default, what in reference(kind):
                print(f"  {name} ({default.strip('`')}): {what}")
        raise Exit


def train(
    config: Annotated[
        Path, Argument(metavar="CONFIG.toml", help="What to train, on which data, and how (--keys prints every key).")
    ],
    settings: Settings = None,
    plan: Annotated[Path | None, Option(help="A plan that replaces CONFIG's (`shardwise plan --save`).")] = None,
    strategy: Annotated[str | None, Option(help="ddp, zero1, zero2, shard_grad_op, fsdp or auto.")] = None,
    run: Annotated[Path | None, Option(help="The run folder (default: run.folder, or runs/CONFIG).")] = None,
    num_ranks: RanksHere = None,
    max_restarts: Annotated[int, Option(min=0, help="How many times to restart the ranks after one dies.")] = 3,
    fresh: Annotated[
        bool, Option("--fresh", help="Start from step 0 and remove the checkpoints in the run folder.")
    ] = False,
    replan: Annotated[
        bool, Option("--replan", help="Choose the plan again, for the devices there are now, and resume under it.")
    ] = False,
    keys: Annotated[
        bool, Option("--keys", callback=_print_keys, is_eager=True, help="Print every key of a config, and exit.")
    ] = False,
) -> None:
    """Train a model; rerun the same command to resume."""
    chosen = load_config(config, settings=settings or (), plan=plan, strategy=strategy, folder=run)
    arguments = ["train", str(config), *(part for setting in settings or () for part in ("--set", setting))]
    arguments += option_words({"--plan": plan, "--strategy": strategy, "--run": run})
    arguments += [option for option, is_given in (("--fresh", fresh), ("--replan", replan)) if is_given]
    # Ranks ignore it; it is part of the command that they write into the run folder.
    arguments += option_words({"--ranks": num_ranks})
    from shardwise.comm.job.job_environment import is_rank

    if is_rank():
        from shardwise.comm.job.allocator_settings import allocator_settings
        from shardwise.training.rank_run import train as train_as_rank

        if not chosen.plan.captures:
            # Read when the first tensor is made on a GPU.
            os.environ.update(allocator_settings())
        train_as_rank(chosen, fresh=fresh, replan=replan, command=("shardwise", *arguments))
        return
    # With --replan, the mesh is chosen again, too.
    count = ranks_to_start(chosen, asked=num_ranks, by_mesh=not replan)
    print(f"Starting {count} {'rank' if count == 1 else 'ranks'} on this machine …", flush=True)
    from shardwise.training.launch.launch import launch

    code = launch(
        arguments,
        num_ranks=count,
        max_restarts=max_restarts,
        folder=chosen.folder,
        grace_seconds=chosen.checkpoint.grace_seconds,
        imports=("shardwise.doors.cli.app", "shardwise.doors.cli.train", "shardwise.training.rank_run"),
    )
    raise Exit(code)


def ranks_to_start(config: TrainConfig, *, asked: int | None, by_mesh: bool = True) -> int:
    """Return the number of ranks: as asked, else as the plan's mesh has, else one per GPU, or one on the CPU."""
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
