"""The config of `shardwise train` as one frozen value: one dataclass per section, each key checked. No torch here.

    CONFIG.toml ◀── --plan PLAN.toml ◀── --strategy, --run ◀── --set section.key=value     the later wins

The run folder holds the resolved config with every key; it is itself a CONFIG.toml.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from shardwise.base.errors import InvalidPlan, ShardwiseError
from shardwise.base.files.atomic import atomic_write
from shardwise.base.files.data_file import UnreadableFile, parse_toml, read_toml
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS
from shardwise.training.config.config_section import ConfigSection, InvalidConfig, unknown_key
from shardwise.training.config.config_sections import (
    AutoSection,
    CheckpointSection,
    DataSection,
    LoopSection,
    OptimizerSection,
    RunSection,
    ScheduleSection,
    TaskSection,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """All sections. [plan] is a Plan as everywhere else, but its micro_batch is required."""

    task: TaskSection
    plan: Plan
    train: LoopSection
    run: RunSection
    data: DataSection = field(default_factory=DataSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    auto: AutoSection = field(default_factory=AutoSection)

    def __post_init__(self) -> None:
        if self.plan.is_auto and self.plan.micro_batch is None and self.auto.global_batch is None:
            raise InvalidConfig(
                "plan.strategy = 'auto' needs auto.global_batch or plan.micro_batch: how many samples a step takes"
            )
        if self.plan.micro_batch is None and not self.plan.is_auto:
            raise InvalidConfig("plan.micro_batch is missing: samples per rank per pass")
        if self.task.lora is not None and self.plan.is_auto:
            raise InvalidConfig("task.lora with plan.strategy = 'auto': adapters are not planned; choose a strategy")
        if self.task.quantize is not None and self.plan.has_fp8:
            raise InvalidConfig(
                f"task.quantize = {self.task.quantize!r} with plan.precision = 'fp8': packed layers cannot multiply in "
                "fp8; set plan.precision = 'bf16'"
            )
        refusal = LIMITS[self.plan.engine].why_not_call("muon", self.plan)
        if self.optimizer.name == "muon" and refusal is not None:
            raise InvalidConfig(
                f"optimizer.name = 'muon' with plan.engine = {self.plan.engine!r} under {self.plan.strategy}: "
                f"{refusal.sentence}; set plan.engine = 'shardwise', or plan.strategy = 'ddp'"
            )
        if self.plan.update != "step" and (self.train.clip_norm or self.train.nonfinite == "skip"):
            raise InvalidConfig(
                f"plan.update = {self.plan.update!r}: gradients are used before their norm is known; set "
                "train.clip_norm = 0 and train.nonfinite to stop or warn"
            )

    @property
    def folder(self) -> Path:
        return Path(self.run.folder)

    def to_dict(self) -> dict[str, Any]:
        """Return every section and key in TOML's own types."""
        return {item.name: getattr(self, item.name).to_dict() for item in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        for name in data:
            if name not in SECTIONS:
                raise unknown_key(f"[{name}]", known=[f"[{section}]" for section in SECTIONS])
        _check_moved(data)
        tables = {name: data.get(name, {}) for name in SECTIONS}
        sections = {name: kind.from_dict(tables[name]) for name, kind in SECTIONS.items() if kind is not Plan}
        return cls(**sections, plan=_plan(tables["plan"]))  # type: ignore[arg-type]

    def save(self, path: Path) -> None:
        """Write the config as TOML; an error leaves no partial file."""
        import tomli_w

        with atomic_write(path) as file:
            tomli_w.dump(self.to_dict(), file)


SECTIONS: Mapping[str, type[ConfigSection] | type[Plan]] = {
    "task": TaskSection,
    "data": DataSection,
    "plan": Plan,
    "optimizer": OptimizerSection,
    "schedule": ScheduleSection,
    "train": LoopSection,
    "checkpoint": CheckpointSection,
    "auto": AutoSection,
    "run": RunSection,
}


# Old name → new name of keys that were moved.
_MOVED: Mapping[str, str] = {"train.compile": "plan.compile"}


def _check_moved(data: Mapping[str, Any]) -> None:
    for old, new in _MOVED.items():
        section, _, name = old.partition(".")
        table = data.get(section)
        if isinstance(table, Mapping) and name in table:
            raise InvalidConfig(f"{old} is {new} now: move the key to [{new.partition('.')[0]}]")


def load_config(
    path: str | os.PathLike[str],
    *,
    settings: Iterable[str] = (),
    plan: str | os.PathLike[str] | None = None,
    strategy: str | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> TrainConfig:
    """Read a config; a mistake is one line that names the file, the key, its value and what is allowed.

    `settings` are `section.key=value`, the value as in TOML or a bare word; an empty value removes the key. Without
    a folder the run goes to runs/NAME, for NAME.toml, so that the same command finds it again.
    """
    try:
        data = read_toml(path)
        data = {"run": {}, **data}
        if isinstance(data["run"], dict):
            data["run"].setdefault("folder", str(Path("runs", Path(path).stem)))
        if plan is not None:
            data["plan"] = Plan.load(plan).to_dict()
        elif isinstance(data.get("plan"), dict) and "file" in data["plan"]:
            data["plan"] = _with_file(data["plan"])
        overrides = [{"plan": {"strategy": strategy}}] if strategy is not None else []
        overrides += [{"run": {"folder": os.fspath(folder)}}] if folder is not None else []
        for override in (*overrides, *map(_setting, settings)):
            _merge(data, override)
        return TrainConfig.from_dict(data)
    except ShardwiseError as error:
        raise InvalidConfig(f"{path}: {error}") from error


def _with_file(table: dict[str, Any]) -> dict[str, Any]:
    """Read [plan] file = "plan.toml" from the working directory; the other keys win over the file's."""
    file = table["file"]
    if not isinstance(file, str):
        raise InvalidConfig(f"plan.file = {file!r}: must be the path of a plan")
    return {**Plan.load(Path(file).absolute()).to_dict(), **{k: v for k, v in table.items() if k != "file"}}


def _plan(table: object) -> Plan:
    if not isinstance(table, Mapping):
        raise InvalidConfig(f"plan = {table!r}: must be a table, [plan]")
    try:
        return Plan.from_dict(table)
    except InvalidPlan as error:
        raise InvalidConfig(f"plan.{error}" if " = " in str(error) else f"[plan]: {error}") from error


def _setting(text: str) -> dict[str, Any]:
    """Read `section.key=value` as TOML; a value that is not TOML is a bare word, and an empty value stays empty."""
    name, equals, value = (part.strip() for part in text.partition("="))
    for spelling in (value, json.dumps(value)):
        try:
            found = parse_toml(f"{name} = {spelling}") if equals and "\n" not in text else {}
        except UnreadableFile:
            continue
        if found and all(isinstance(table, dict) for table in found.values()):
            return found
    raise InvalidConfig(f"--set {text!r}: must be section.key=value")


def _merge(data: dict[str, Any], override: Mapping[str, Any]) -> None:
    for name, value in override.items():
        if isinstance(value, Mapping) and isinstance(data.get(name), dict):
            _merge(data[name], value)
        elif value == "":
            data.pop(name, None)
        else:
            data[name] = value
