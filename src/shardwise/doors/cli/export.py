"""`shardwise export` and `shardwise import`: plans as files of other tools, and their files as plans."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from shardwise.base.errors import InvalidPlan

_TARGETS = "accelerate, deepspeed, torchtitan, torchrun or slurm"


def export(
    plan: Annotated[Path, Argument(metavar="PLAN.toml", help="A plan (`shardwise plan --save`).")],
    target: Annotated[str, Option("--to", help=f"{_TARGETS}.")],
    out: Annotated[Path, Option(help="The folder to write into.")],
    ranks_per_node: Annotated[
        int | None, Option("--ranks", min=1, help="Ranks per machine (default: the plan's mesh, or 8).")
    ] = None,
    num_nodes: Annotated[int, Option("--nodes", min=1, help="Number of machines.")] = 1,
    cpu: Annotated[bool, Option("--cpu", help="The machines have no GPUs.")] = False,
) -> None:
    """Write a plan as files for another tool.

    Settings that the tool cannot express are listed on stderr.
    """
    from shardwise.doors.interchange.exported import JobShape
    from shardwise.doors.interchange.targets import export as exported_for
    from shardwise.doors.interchange.targets import write
    from shardwise.plan import Plan

    chosen = Plan.load(plan)
    if ranks_per_node is None:
        ranks_per_node = chosen.mesh.num_ranks // num_nodes if chosen.mesh is not None else 8
    shape = JobShape(num_nodes=num_nodes, ranks_per_node=max(1, ranks_per_node), has_gpus=not cpu)
    exported = exported_for(chosen, shape, target=target)
    for path in write(exported, folder=out):
        print(path)
    for line in exported.left_out:
        print(f"{target}: {line}", file=sys.stderr)


def import_(
    path: Annotated[Path, Argument(metavar="FILE", help="A file of Accelerate, DeepSpeed, Lightning, …")],
    out: Annotated[Path, Option(help="The plan to write.")] = Path("plan.toml"),
) -> None:
    """Turn a config of another tool into a plan.

    Reads files of Accelerate, DeepSpeed, Lightning, torchtitan and TrainingArguments.
    """
    from dataclasses import replace

    from shardwise.doors.interchange.recognise import read_setup

    if out.exists():
        raise InvalidPlan(f"{out} exists: remove it, or choose another --out")
    setup = read_setup(path)
    for line, fix in setup.settings.wrong.values():
        raise InvalidPlan(f"{path}: {line}; {fix}")
    # Shardwise's engine runs the imported plan, with its defaults.
    replace(setup.plan, engine="shardwise", capture="auto").save(out)
    print(f"{out}: {setup.plan.strategy}, as {path} of {setup.tool}")
    for line in setup.left_out:
        print(f"{setup.tool}: {line}", file=sys.stderr)
