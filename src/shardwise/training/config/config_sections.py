"""The sections of a config: each key with its default, what it means and what it may be. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shardwise.base.errors import InvalidData
from shardwise.base.files.keys import key
from shardwise.base.files.object_path import check_url
from shardwise.base.vocabulary.quantities import SIZE_EXAMPLE, byte_count
from shardwise.models.catalogue import kind_of
from shardwise.models.specs.spec_request import QUANTIZED, Adaptation
from shardwise.training.config.config_section import ConfigSection, InvalidConfig

if TYPE_CHECKING:
    from shardwise.models.reference import Model

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
        return kind_of(self.model)[0] == "hf"

    @property
    def adaptation(self) -> Adaptation | None:
        """The adapters that are trained instead of all parameters."""
        if self.lora is None:
            return None
        return Adaptation(rank=self.lora, alpha=self.lora_alpha, targets=self.lora_targets, quantize=self.quantize)

    def named(self, *, kernels: str = "cuda") -> "Model":
        """Return the model; `kernels` are those that its spec has."""
        from shardwise.models.reference import Model

        return Model(self.model, seq=self.seq, image=self.image, kernels=kernels)


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
        "times that a run which has run out of memory is started again under a smaller plan (default: 3 where the "
        "plan is auto, else 0)",
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
    folder: str | None = key(
        None, "a folder, or s3://, gs://, az://, hf:// (default: checkpoints/ in run.folder; docs/checkpoints.md)"
    )
    asynchronous: bool = key(True, "written while training continues")
    memory: bool = key(False, "keep snapshots in /dev/shm too: a rank that dies costs seconds (docs/recovery.md)")
    memory_every: int | None = key(None, "steps between those (default: as often as costs 1% of the time)", least=1)
    copies: int = key(1, "with several nodes: copies of each of those on another node", least=0, most=1)
    grace_seconds: float = key(60.0, "after SIGTERM: time to write the checkpoint before the rank is killed", above=1)

    def __post_init__(self) -> None:
        ConfigSection.__post_init__(self)
        try:
            check_url(self.folder or "")
        except InvalidData as error:
            raise InvalidConfig(f"checkpoint.folder: {error}") from None


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
