"""The tools that a plan can be exported to."""

from collections.abc import Callable, Mapping
from pathlib import Path

from shardwise.base.errors import InvalidPlan, UnknownName
from shardwise.base.files.atomic import atomic_write
from shardwise.doors.interchange.exported import Exported, JobShape
from shardwise.doors.interchange.to_accelerate import to_accelerate
from shardwise.doors.interchange.to_deepspeed import to_deepspeed
from shardwise.doors.interchange.to_launchers import to_slurm, to_torchrun
from shardwise.doors.interchange.to_torchtitan import to_torchtitan
from shardwise.plan import Plan

TARGETS: Mapping[str, Callable[[Plan, JobShape], Exported]] = {
    "accelerate": to_accelerate,
    "deepspeed": to_deepspeed,
    "torchtitan": to_torchtitan,
    "torchrun": to_torchrun,
    "slurm": to_slurm,
}

# Targets that train by an engine of their own; the others start Shardwise's.
_OTHER_ENGINES = ("accelerate", "deepspeed", "torchtitan")


def export(plan: Plan, shape: JobShape, *, target: str) -> Exported:
    if target not in TARGETS:
        raise UnknownName.of("target", target, known=TARGETS)
    if plan.has_fp8 and target in _OTHER_ENGINES:
        raise InvalidPlan(f"precision = 'fp8' is Shardwise's own, and not for {target}: export precision = 'bf16'")
    if plan.mesh is not None:
        plan.mesh.check_ranks(shape.num_ranks)
    return TARGETS[target](plan, shape)


def write(exported: Exported, *, folder: Path) -> list[Path]:
    """Write the files into a folder and return their paths; existing files are not replaced."""
    paths = [folder / name for name in exported.files]
    there = next((path for path in paths if path.exists()), None)
    if there is not None:
        raise InvalidPlan(f"{there} exists: remove it, or choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, exported.files.values(), strict=True):
            with atomic_write(path) as file:
                file.write(text.encode())
            if text.startswith("#!"):
                path.chmod(path.stat().st_mode | 0o111)
    except OSError as error:
        raise InvalidPlan(f"{folder}: cannot be written ({error.strerror})") from error
    return paths
