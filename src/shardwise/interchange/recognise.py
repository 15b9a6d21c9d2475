"""Finds the tool that a config file belongs to, and reads the file as a setup."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from shardwise.errors import InvalidPlan, ShardwiseError
from shardwise.files.regular_file import read_at_most
from shardwise.files.toml_file import read_toml
from shardwise.interchange.foreign_setup import ForeignSetup
from shardwise.interchange.from_accelerate import from_accelerate
from shardwise.interchange.from_deepspeed import from_deepspeed
from shardwise.interchange.from_lightning import from_lightning
from shardwise.interchange.from_torchtitan import from_torchtitan
from shardwise.interchange.from_trainer import from_trainer
from shardwise.plan import Plan

Table = Mapping[str, Any]
_MOST_BYTES = 4 * 2**20
# With aliases a short YAML file can stand for more values than any reader comes to the end of.
_MOST_VALUES = 100_000
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
    data: Any
    try:
        if path.suffix == ".toml":
            data = read_toml(path)
        else:
            text = read_at_most(path, _MOST_BYTES).decode()
            data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise InvalidPlan(f"{path}: cannot be read ({error.strerror})") from error
    except ShardwiseError as error:
        raise InvalidPlan(f"{path}: {error}") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise InvalidPlan(f"{path}: is neither JSON nor YAML: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        raise InvalidPlan(f"{path}: holds no settings by name")
    if _num_values(data, counted={}) > _MOST_VALUES:
        raise InvalidPlan(f"{path}: stands for more than {_MOST_VALUES:,} values, by aliases: write them out")
    return data


def _num_values(value: Any, *, counted: dict[int, int]) -> int:
    """Return the number of values in a tree, in which one object may stand in several places."""
    if not isinstance(value, list | tuple | set | Mapping):
        return 1
    if id(value) not in counted:
        # An object inside of itself counts as endless.
        counted[id(value)] = _MOST_VALUES
        parts = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
        counted[id(value)] = 1 + sum(_num_values(part, counted=counted) for part in parts)
    return counted[id(value)]
