"""The run folder of a training.

config.toml        the resolved config, every key written out; itself a CONFIG.toml
plan.toml          its plan, for `--plan` and `shardwise doctor`
auto.json          with plan.strategy = "auto": the question and the chosen plan (auto_plan.py)
environment.json   versions, devices, number of ranks, command line
metrics.jsonl      one line per step
checkpoints/       step-00001000/ …, unless checkpoint.folder is another place
snapshots.json     with checkpoint.memory: the key of the snapshots in /dev/shm
model/             of an hf: model, after the last step: the model, or its adapters, for from_pretrained
saved.json         the step of the newest checkpoint; outside checkpoints/, which may be a volume that is not mounted
tensorboard/       if it is installed
logs/              the output of each rank, if our launcher started them
autopsy-rank-N.json  the operations that each rank had issued when the job failed, for `shardwise autopsy`
.shardwise         marks the folder as one that a run has made: in others nothing is replaced or removed
"""

import json
import os
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.base.errors import InvalidPlan
from shardwise.base.files.atomic import atomic_write
from shardwise.base.files.data_file import UnreadableFile, read_json, read_toml
from shardwise.base.files.form import WrongForm, whole
from shardwise.base.files.object_path import Location, ObjectPath, location
from shardwise.base.vocabulary.version import __version__
from shardwise.comm.autopsy.own_record import clear_records
from shardwise.state.checkpoint.disk import Disk
from shardwise.state.checkpoint.folder import checkpoints_in, sweep
from shardwise.state.recovery.memory_key import forget
from shardwise.training.config.config import TrainConfig
from shardwise.training.config.config_section import InvalidConfig

CHECKPOINTS, METRICS, TENSORBOARD = "checkpoints", "metrics.jsonl", "tensorboard"
MODEL = "model"
AUTO, _SAVED = "auto.json", "saved.json"
_CONFIG, _PLAN, _ENVIRONMENT = "config.toml", "plan.toml", "environment.json"
_MARKER = ".shardwise"
_FILES = (_SAVED, AUTO, METRICS, _CONFIG, _PLAN, _ENVIRONMENT)
# With another value of these, a checkpoint's weights, optimizer state or position in the data mean nothing.
_IDENTITY = (
    "task.model",
    "task.dataset",
    "task.seq",
    "task.image",
    "task.tokenizer",
    "task.lora",
    "task.lora_alpha",
    "task.lora_targets",
    "data.shuffle",
    "optimizer.name",
    "optimizer.decay_vectors",
    "train.seed",
)


def checkpoint_folder(config: TrainConfig) -> Location:
    """Return the place of the checkpoints of a run."""
    given = config.checkpoint.folder
    return config.folder / CHECKPOINTS if given is None else location(given)


def claim(config: TrainConfig, *, fresh: bool, environment: dict[str, Any]) -> list[str]:
    """Claim the folder for this config; return notes to show: keys whose values have changed.

    A folder whose checkpoints belong to another model, optimizer or order of data, or are gone, raises an error, and
    nothing is written; `fresh` removes them, and all else that an earlier run left, but nothing in checkpoint.folder.
    """
    folder, checkpoints = config.folder, checkpoint_folder(config)
    there = checkpoints_in(checkpoints)
    if fresh and there and config.checkpoint.folder is not None:
        raise InvalidConfig(
            f"--fresh: {checkpoints} holds {len(there)} checkpoints, which may be of another run: remove them, or "
            "choose another checkpoint.folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_foreign(folder, fresh=fresh)
        if fresh:
            _mark(folder)
            _clear(folder)
        if not checkpoints_in(checkpoints):
            refuse_if_saved(config)
        changes = _changes(config)
        # The remains of a killed save may be what fills the disk.
        sweep(checkpoints, disk=Disk())
        clear_records(folder)
        _mark(folder)
        save_plan(config)
        with atomic_write(folder / _ENVIRONMENT) as file:
            file.write(json.dumps(environment, indent=2).encode() + b"\n")
    except OSError as error:
        raise InvalidConfig(f"run.folder = {str(folder)!r}: cannot be written ({error.strerror})") from error
    return [f"{name}: {then} → {now}" for name, (then, now) in changes.items()]


def refuse_foreign(folder: Path, *, fresh: bool = False) -> None:
    """Raise an error if the folder holds what a run would replace or remove, and no run has made the folder.

    Checkpoints that `shardwise checkpoint import` has made are what a run starts from; `fresh` would remove them.
    """
    if _is_ours(folder):
        return
    ours = checkpoints_in(folder / CHECKPOINTS) if not fresh else []
    foreign = [name for name in _FILES if os.path.lexists(folder / name)]
    foreign += [name for name in (CHECKPOINTS, TENSORBOARD) if set(_inside(folder / name)) - set(ours)]
    if foreign:
        raise InvalidConfig(
            f"{folder} holds {', '.join(foreign)}, and is not the folder of a run of shardwise train: nothing in it is "
            "replaced or removed; choose another --run, or move away what is there"
        )


def _mark(folder: Path) -> None:
    with atomic_write(folder / _MARKER) as file:
        file.write(b"The folder of a run of shardwise train.\n")


def _is_ours(folder: Path) -> bool:
    """Return whether a run has made the folder. Earlier versions left no marker; environment.json names them."""
    if (folder / _MARKER).is_file():
        return True
    try:
        return isinstance(read_json(folder / _ENVIRONMENT)["shardwise"], str)
    except (UnreadableFile, KeyError, TypeError):
        return False


def _inside(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def save_plan(config: TrainConfig) -> None:
    """Write the config and its plan."""
    config.save(config.folder / _CONFIG)
    config.plan.save(config.folder / _PLAN)


def save_step(folder: Path, step: int) -> None:
    """Write the step of a checkpoint that is on the disk."""
    with atomic_write(folder / _SAVED) as file:
        file.write(json.dumps({"step": step}).encode() + b"\n")


def refuse_if_saved(config: TrainConfig) -> None:
    """Raise an error if the run has saved a checkpoint; to be called when none is found: training must not start."""
    folder, path = config.folder, checkpoint_folder(config)
    there = len(checkpoints_in(path))
    step = _saved_step(folder)
    if step is None and not there:
        return
    found = "all its checkpoints are damaged" if there else f"it saved step {step}, but {path} {_state(path)}"
    raise InvalidConfig(
        f"{folder} holds a run that cannot be resumed: {found}; restore or mount it, choose another --run, "
        "or --fresh to start at step 0"
    )


def _state(path: Location) -> str:
    if isinstance(path, ObjectPath):
        return "holds no checkpoint"
    if not path.exists():
        return "is missing"
    return "holds no checkpoint" if os.access(path, os.R_OK | os.X_OK) else "cannot be read"


def _saved_step(folder: Path) -> int | None:
    try:
        return int(whole(least=0)(read_json(folder / _SAVED)["step"], ""))
    except UnreadableFile as error:
        return None if error.is_missing else 0
    except (KeyError, TypeError, WrongForm):
        return 0


def _clear(folder: Path) -> None:
    forget(folder)
    for name in (CHECKPOINTS, TENSORBOARD):
        path = folder / name
        if path.is_symlink():
            raise InvalidConfig(
                f"--fresh: {path} is a link to {path.readlink()}; nothing is removed through a link: remove it"
            )
        if path.exists():
            shutil.rmtree(path)
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)


def _changes(config: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return key → (value of the run in the folder, value now), if there is a checkpoint to resume."""
    folder = config.folder
    earlier = earlier_steps(config)
    if earlier is None:
        return {}
    then, now = _flat(earlier[0]), _flat(config)
    changes = {name: (then.get(name), now.get(name)) for name in {**then, **now} if then.get(name) != now.get(name)}
    for name in _IDENTITY:
        if name in changes:
            before, after = changes[name]
            raise InvalidConfig(
                f"{folder} holds a run with {name} = {before!r}, this one has {after!r}: give it another folder "
                "(--run DIR), or --fresh to start this one again"
            )
    return changes


def read_config(folder: Path) -> TrainConfig:
    """Return the resolved config of the run in a folder."""
    refuse_foreign(folder)
    try:
        return TrainConfig.from_dict(read_toml(folder / _CONFIG))
    except (UnreadableFile, InvalidConfig, InvalidPlan) as error:
        raise InvalidConfig(f"{folder / _CONFIG}: {error}: --fresh starts the run again") from error


def earlier_steps(config: TrainConfig) -> tuple[TrainConfig, int | None] | None:
    """Return the config of the run in the folder that can be resumed, and its samples per step; None without one."""
    folder, checkpoints = config.folder, checkpoint_folder(config)
    has_any = checkpoints_in(checkpoints) if isinstance(checkpoints, ObjectPath) else any(checkpoints.glob("step-*"))
    if not (folder / _CONFIG).exists() or not has_any:
        return None
    return read_config(folder), samples_of_step(folder)


def samples_of_step(folder: Path) -> int | None:
    """Return the samples per step of the run in a folder, on all ranks; None if there is no run."""
    if not (folder / _CONFIG).exists():
        return None
    plan = read_config(folder).plan
    try:
        num_ranks = whole(least=1)(read_json(folder / _ENVIRONMENT)["num_ranks"], "num_ranks")
    except (UnreadableFile, KeyError, TypeError, WrongForm):
        return None
    return None if plan.micro_batch is None else plan.micro_batch * plan.accumulate * num_ranks


def _flat(config: TrainConfig) -> dict[str, Any]:
    """Return section.key → value, without the folders, which may have been moved."""
    return {
        f"{section}.{name}": value
        for section, table in config.to_dict().items()
        for name, value in table.items()
        if (section, name) not in (("run", "folder"), ("checkpoint", "folder"))
    }


def environment(*, device: torch.device, num_ranks: int, command: Sequence[str]) -> dict[str, Any]:
    """Return what a run depends on besides its config; nothing in it names this machine."""
    is_cuda = device.type == "cuda"
    return {
        "shardwise": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if is_cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_cuda else None,  # type: ignore[no-untyped-call]
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "threads": torch.get_num_threads(),
        "num_ranks": num_ranks,
        "command": list(command),
    }
