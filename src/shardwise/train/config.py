"""The config of `shardwise train` as one frozen value: one dataclass per section, each key checked. No torch here.

    CONFIG.toml ◀── --plan PLAN.toml ◀── --strategy, --run ◀── --set section.key=value     the later wins

The run folder holds the resolved config with every key; it is itself a CONFIG.toml.
"""

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from shardwise.errors import InvalidPlan, ShardwiseError
from shardwise.files.atomic import atomic_write
from shardwise.files.keys import key
from shardwise.files.toml_file import read_toml
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS
from shardwise.spec.adaptation import QUANTIZED
from shardwise.train.config_section import ConfigSection, InvalidConfig, unknown_key
from shardwise.vocabulary.quantities import SIZE_EXAMPLE, byte_count

OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "adamw": ("betas", "eps", "fused"),
    "adam": ("betas", "eps", "fused"),
    "nadam": ("betas", "eps"),
    "radam": ("betas", "eps"),
    "adagrad": ("eps", "fused"),
    "rmsprop": ("eps", "momentum"),
    "sgd": ("momentum", "nesterov", "fused"),
    "muon": ("betas", "eps", "fused", "momentum", "nesterov", "ns_steps"),
}
"""Name → its options besides lr and weight_decay. All but muon step every element by itself; muon (muon.py)
steps whole matrices, each of which one rank owns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSection(ConfigSection):
    """The model and its data."""

    section: ClassVar[str] = "task"
    model: str = key(
        ..., "a name of `shardwise models`, hf:DIR (a checkpoint to fine-tune), or python:FILE.py:function"
    )
    dataset: str | None = key(
        None, "stdlib, text:PATH, tokens:PATH, digits, images:DIR, hf:NAME, random; a python: task brings its own"
    )
    seq: int | None = key(None, "tokens per sample (default: the model's longest)", least=1)
    image: int | None = key(None, "width and height of an image in pixels (default: the model's)", least=1)
    tokenizer: str | None = key(None, "tokenizer.json for text: (default: hf:DIR's own)")
    lora: int | None = key(None, "rank of LoRA adapters: they alone are trained, on a frozen hf: model", least=1)
    lora_alpha: float | None = key(None, "scale of the adapters (default: twice the rank)", above=0)
    lora_targets: tuple[str, ...] = key(
        (), "modules that get adapters, such as q_proj, v_proj (default: all linear ones)"
    )
    quantize: str | None = key(None, "linear layers of the frozen base in 4 bits (QLoRA, with lora)", choices=QUANTIZED)

    def __post_init__(self) -> None:
        ConfigSection.__post_init__(self)
        for name in ("tokenizer", "lora", "lora_alpha", "lora_targets", "quantize"):
            if getattr(self, name) and not self.is_checkpoint:
                raise InvalidConfig(f"task.{name}: task.model = {self.model!r} is not hf:DIR, which alone has it")
        if self.lora is None and (self.lora_alpha or self.lora_targets):
            raise InvalidConfig("task.lora is missing: the rank of the adapters")
        if self.lora is None and self.quantize:
            raise InvalidConfig(
                f"task.quantize = {self.quantize!r} needs task.lora, since a frozen base alone learns nothing"
            )

    @property
    def is_checkpoint(self) -> bool:
        return self.model.startswith("hf:")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection(ConfigSection):
    """Loading of samples."""

    section: ClassVar[str] = "data"
    workers: int = key(0, "processes per rank that load samples; 0: the rank itself", least=0, most=1024)
    shuffle: bool = key(True, "a new order in each epoch, from train.seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection(ConfigSection):
    """The optimizer; an option that is left out has torch's own default."""

    section: ClassVar[str] = "optimizer"
    name: str = key("adamw", "which one", choices=OPTIMIZERS)
    lr: float = key(1e-3, "the highest learning rate of the schedule", above=0)
    weight_decay: float | None = key(None, "of matrices (see decay_vectors)", least=0)
    decay_vectors: bool = key(False, "biases and norms decay too")
    betas: tuple[float, float] | None = key(None, "adamw, adam, nadam, radam, muon's AdamW", least=0, below=1)
    eps: float | None = key(None, "all but sgd; of muon, its AdamW's", above=0)
    momentum: float | None = key(None, "sgd, rmsprop, muon", least=0, below=1)
    nesterov: bool | None = key(None, "sgd, muon")
    ns_steps: int | None = key(None, "muon: Newton-Schulz iterations", least=1, most=99)
    fused: bool | None = key(None, "one kernel per step: adamw, adam, adagrad, sgd, muon's AdamW")

    def __post_init__(self) -> None:
        ConfigSection.__post_init__(self)
        for option in ("betas", "eps", "momentum", "nesterov", "ns_steps", "fused"):
            if getattr(self, option) is not None and option not in OPTIMIZERS[self.name]:
                has = [other for other, options in OPTIMIZERS.items() if option in options]
                raise InvalidConfig(
                    f"optimizer.{option} = {getattr(self, option)}: {self.name} has no {option}, only {', '.join(has)}"
                )
        if self.nesterov and not self.momentum and not (self.name == "muon" and self.momentum is None):
            raise InvalidConfig("optimizer.nesterov = true needs optimizer.momentum above 0")

    def options(self) -> dict[str, Any]:
        """Return the arguments of torch's class besides the parameters and lr."""
        given = {option: getattr(self, option) for option in ("weight_decay", *OPTIMIZERS[self.name])}
        return {option: value for option, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSection(ConfigSection):
    """The learning rate over the steps (learning_rate.py)."""

    section: ClassVar[str] = "schedule"
    name: str = key("cosine", "how it falls after the warm-up", choices=("constant", "linear", "cosine"))
    warmup_steps: int = key(0, "steps in which it rises to optimizer.lr", least=0)
    final_ratio: float = key(0.0, "final learning rate, as a share of optimizer.lr", least=0, most=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSection(ConfigSection):
    """The length of the training, and actions between steps."""

    section: ClassVar[str] = "train"
    steps: int | None = key(None, "optimizer steps; this or epochs", least=1)
    epochs: int | None = key(None, "passes over the dataset; the last step takes what is left", least=1)
    clip_norm: float = key(1.0, "largest gradient norm; 0: neither clipped nor measured", least=0)
    nonfinite: str = key(
        "stop",
        "on a NaN or Inf in the loss or gradient norm: end the run, skip the step, or only report it",
        choices=("stop", "skip", "warn"),
    )
    eval_every: int | None = key(None, "steps between evaluations (default: at the end only); 0: never", least=0)
    eval_samples: int | None = key(None, "evaluate on this many samples (default: all)", least=1)
    log_every: int = key(10, "steps between log lines, and between waits for the device", least=1)
    seed: int = key(0, "of weights, order and dropout", least=0, most=2**32 - 1)
    compare_every: int = key(1000, "steps between comparisons of what all ranks must hold alike; 0: never", least=0)
    survive: int | None = key(
        None,
        "times that a run survives running out of memory, with a smaller plan (default: 3 where the plan is auto and "
        "steps cannot be captured, else 0)",
        least=0,
    )
    deterministic: bool = key(False, "only kernels that give the same bits each time, or an error")

    def __post_init__(self) -> None:
        ConfigSection.__post_init__(self)
        if (self.steps is None) == (self.epochs is None):
            both = "both are given" if self.steps is not None else "neither is given"
            raise InvalidConfig(f"train.steps or train.epochs must say how long: {both}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection(ConfigSection):
    """Saving of state, which also happens at the end and on SIGTERM."""

    section: ClassVar[str] = "checkpoint"
    every: int = key(1000, "steps between checkpoints; 0: only at the end and on SIGTERM", least=0)
    keep: int = key(2, "how many of the newest to keep", least=1)
    asynchronous: bool = key(True, "written while training continues")
    memory: bool = key(False, "keep snapshots in /dev/shm too: a rank that dies costs seconds (docs/recovery.md)")
    memory_every: int | None = key(None, "steps between those (default: as often as costs 1% of the time)", least=1)
    copies: int = key(1, "with several nodes: copies of each of those on another node", least=0, most=1)
    detached: bool = key(False, "written from the snapshot in memory, by a process of its own (needs memory)")
    grace_seconds: float = key(60.0, "after SIGTERM: time to write the checkpoint before the rank is killed", above=1)

    def __post_init__(self) -> None:
        ConfigSection.__post_init__(self)
        if self.detached and not self.memory:
            raise InvalidConfig("checkpoint.detached = true needs checkpoint.memory = true")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection(ConfigSection):
    """The place of the run, and the files that it leaves."""

    section: ClassVar[str] = "run"
    folder: str = key(..., "where a run of NAME.toml writes its files (--run)", filled_in="runs/NAME")
    device: str = key("auto", "auto: one GPU per rank if there are GPUs", choices=("auto", "cpu", "cuda"))
    limit_seconds: float = key(600.0, "how long a rank waits for the others to join", above=0)
    watch_seconds: float = key(
        300.0, "end the run when one rank has held up the others for this long; 0: never", least=0
    )
    tensorboard: bool = key(True, "write TensorBoard's files as well, if it is installed")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoSection(ConfigSection):
    """Constraints of plan.strategy = "auto"; unused under any other strategy."""

    section: ClassVar[str] = "auto"
    global_batch: int | None = key(None, "samples per step over all ranks; this or plan.micro_batch", least=1)
    budget: str | None = key(None, f"memory to use per device, such as {SIZE_EXAMPLE} (default: all)")
    goal: str = key(
        "throughput", "the fastest plan, or the one with the smallest peak", choices=("throughput", "memory")
    )
    probe: bool = key(
        True, "try a step before training: if it needs more memory than was predicted, solve with a smaller budget"
    )

    @property
    def budget_bytes(self) -> int | None:
        return None if self.budget is None else byte_count(self.budget, key="auto.budget")


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
        if self.train.nonfinite == "skip" and self.plan.captures:
            raise InvalidConfig(
                "train.nonfinite = 'skip': a captured step cannot be skipped; "
                "set it to stop or warn, or plan.capture = 'auto' or 'off'"
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
            data["plan"] = _with_file(data["plan"], folder=Path(path).parent)
        overrides = [{"plan": {"strategy": strategy}}] if strategy is not None else []
        overrides += [{"run": {"folder": os.fspath(folder)}}] if folder is not None else []
        for override in (*overrides, *map(_setting, settings)):
            _merge(data, override)
        return TrainConfig.from_dict(data)
    except ShardwiseError as error:
        raise InvalidConfig(f"{path}: {error}") from error


def _with_file(table: dict[str, Any], *, folder: Path) -> dict[str, Any]:
    """Read [plan] file = "plan.toml" from the config's own folder; the other keys win over the file's."""
    file = table["file"]
    if not isinstance(file, str):
        raise InvalidConfig(f"plan.file = {file!r}: must be the path of a plan")
    return {**Plan.load(folder / file).to_dict(), **{k: v for k, v in table.items() if k != "file"}}


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
            found = tomllib.loads(f"{name} = {spelling}") if equals and "\n" not in text else {}
        except ValueError:
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
