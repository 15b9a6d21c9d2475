"""Finds the tool that a config file belongs to, and reads the file as a setup."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.base.errors import InvalidPlan, ShardwiseError
from shardwise.base.files.data_file import read_json, read_toml, read_yaml
from shardwise.doors.interchange.foreign_setup import ForeignSetup
from shardwise.doors.interchange.from_accelerate import from_accelerate
from shardwise.doors.interchange.from_deepspeed import from_deepspeed
from shardwise.doors.interchange.from_lightning import from_lightning
from shardwise.doors.interchange.from_torchtitan import from_torchtitan
from shardwise.doors.interchange.from_trainer import from_trainer
from shardwise.plan import Plan

Table = Mapping[str, Any]
# Tried in this order: a file of Accelerate may have keys that others have too.
_READERS: tuple[Callable[[Table], ForeignSetup | None], ...] = (
    *(from_accelerate, from_deepspeed, from_torchtitan, from_trainer, from_lightning),
)


def read_setup(path: Path) -> ForeignSetup:
    data = _table(path)
    try:
        setup = next(filter(None, (read(data) for read in _READERS)), None)
        if setup is not None:
            return replace(setup, plan=_as_run(setup))
    except ShardwiseError as error:
        raise InvalidPlan(f"{path}: {error}") from error
    raise InvalidPlan(
        f"{path}: not a file of Accelerate, DeepSpeed, Lightning, torchtitan or the Hugging Face Trainer, "
        "and not a plan of Shardwise"
    )


def _as_run(setup: ForeignSetup) -> Plan:
    """Return the plan with the engine that is closest: other tools run steps operation by operation.

    Their CPU updates what is offloaded, which the plans of torch's engine do not have.
    """
    ours = setup.foreign or setup.plan.offload_states
    plan = replace(setup.plan, engine="shardwise" if ours else "torch", capture="off")
    return replace(plan, offload_update="host") if plan.offload_states else plan


def _table(path: Path) -> Table:
    # Settings names the key of a number that is not finite.
    readers: dict[str, Callable[[Path], Any]] = {".toml": read_toml, ".json": partial(read_json, finite=False)}
    read = readers.get(path.suffix, read_yaml)
    try:
        data = read(path)
    except ShardwiseError as error:
        raise InvalidPlan(f"{path}: {error}") from error
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        raise InvalidPlan(f"{path}: holds no settings by name")
    return data
