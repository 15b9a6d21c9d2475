"""Reads arguments of Hugging Face's Trainer (TrainingArguments) from JSON or YAML."""

from collections.abc import Mapping
from typing import Any

from shardwise.doors.interchange.foreign_setup import ZERO_STAGES, ForeignSetup, units_of
from shardwise.doors.interchange.setting_values import Settings
from shardwise.plan import Plan

_WORDS = (
    "full_shard",
    "shard_grad_op",
    "hybrid_shard",
    "hybrid_shard_zero2",
    "no_shard",
    "offload",
    "auto_wrap",
    "xla",
)
_KEYS = ("per_device_train_batch_size", "output_dir", "num_train_epochs", "learning_rate")


def from_trainer(data: Mapping[str, Any]) -> ForeignSetup | None:
    """Return the setup; None if the file is not the Trainer's."""
    if "per_device_train_batch_size" not in data and sum(key in data for key in _KEYS) < 2:
        return None
    # These two may also be the paths of files.
    paths = {key: value for key in ("deepspeed", "fsdp_config") if isinstance(value := data.get(key), str) and value}
    settings = Settings({key: value for key, value in data.items() if key not in paths})
    uses_deepspeed = "deepspeed" in paths or settings.has("deepspeed")
    words = _words(settings)
    layers = ("fsdp_config.transformer_layer_cls_to_wrap", "fsdp_transformer_layer_cls_to_wrap")
    wraps = next((found for name in layers if (found := settings.class_names(name))), None)
    sharded = bool(words) and not uses_deepspeed
    wraps_nothing = sharded and "auto_wrap" not in words and wraps is None
    wraps_nothing = wraps_nothing and not settings.has("fsdp_config.auto_wrap_policy")
    strategy = "ddp"
    if sharded:
        strategy = "shard_grad_op" if {"shard_grad_op", "hybrid_shard_zero2"} & set(words) else "fsdp"
        version = "version" if settings.has("fsdp_config.version") else "fsdp_version"
        if settings.one_of(f"fsdp_config.{version}", {1: 1, 2: 2}, default=1) == 2:
            reshards = settings.switch("fsdp_config.reshard_after_forward", default=True)
            strategy = "fsdp" if reshards else "shard_grad_op"
    elif uses_deepspeed:
        strategy = settings.one_of("deepspeed.zero_optimization.stage", ZERO_STAGES, default="ddp")
    recomputes = [settings.switch(name) for name in ("gradient_checkpointing", "fsdp_config.activation_checkpointing")]
    plan = Plan(
        strategy=strategy,
        units=units_of(wraps, wraps_nothing=wraps_nothing) if sharded else "auto",
        micro_batch=settings.count("per_device_train_batch_size", default=8),
        accumulate=settings.count("gradient_accumulation_steps"),
        precision=next((name for name in ("bf16", "fp16") if settings.switch(name)), "fp32"),
        recompute="full" if any(recomputes) else "none",
        offload_states="offload" in words,
        compile="inductor" if settings.switch("torch_compile") else "none",
    )
    left_out = [f"{key}: read that file too" for key in paths]
    return ForeignSetup(
        tool="transformers",
        plan=plan,
        settings=settings,
        foreign="deepspeed" if uses_deepspeed else "",
        left_out=tuple(left_out),
        wraps=wraps,
    )


def _words(settings: Settings) -> list[str]:
    """Return the words of `"full_shard auto_wrap"`, of a list, or of true."""
    value = settings.values.get("fsdp")
    if isinstance(value, bool):
        return ["full_shard"] if value else []
    if isinstance(value, list):
        found = [str(part).strip().lower() for part in value]
    else:
        found = settings.text("fsdp", default="").lower().replace(",", " ").split()
    return (
        settings.refuse("fsdp", must=f"some of {', '.join(_WORDS)}", default=[]) if set(found) - set(_WORDS) else found
    )
