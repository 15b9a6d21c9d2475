"""Reads arguments of Hugging Face's Trainer (TrainingArguments) from JSON or YAML."""

from collections.abc import Mapping
from typing import Any

from shardwise.interchange.foreign_setup import ZERO_STAGES, ForeignSetup, units_of
from shardwise.interchange.setting_values import as_bool, as_count, class_names, flatten
from shardwise.plan import Plan

_KEYS = ("per_device_train_batch_size", "output_dir", "num_train_epochs", "learning_rate")


def from_trainer(data: Mapping[str, Any]) -> ForeignSetup | None:
    """Return the setup; None if the file is not the Trainer's."""
    if "per_device_train_batch_size" not in data and sum(key in data for key in _KEYS) < 2:
        return None
    words = _words(data.get("fsdp", ""))
    given = data.get("fsdp_config")
    config: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    deepspeed = data.get("deepspeed")
    layers = config.get("transformer_layer_cls_to_wrap", data.get("fsdp_transformer_layer_cls_to_wrap"))
    wraps = class_names(layers) or None
    sharded = bool(words) and not deepspeed
    wraps_nothing = sharded and "auto_wrap" not in words and wraps is None and not config.get("auto_wrap_policy")
    strategy = "ddp"
    if sharded:
        strategy = "shard_grad_op" if {"shard_grad_op", "hybrid_shard_zero2"} & set(words) else "fsdp"
        if as_count(config.get("version", config.get("fsdp_version"))) == 2:
            strategy = "fsdp" if as_bool(config.get("reshard_after_forward", True)) else "shard_grad_op"
    elif isinstance(deepspeed, Mapping):
        stage = flatten(deepspeed).get("zero_optimization.stage", 0)
        strategy = ZERO_STAGES.get(stage if isinstance(stage, int) else 0, "ddp")
    recomputes = as_bool(data.get("gradient_checkpointing")) or as_bool(config.get("activation_checkpointing"))
    plan = Plan(
        strategy=strategy,
        units=units_of(wraps, wraps_nothing=wraps_nothing) if sharded else "auto",
        micro_batch=as_count(data.get("per_device_train_batch_size"), default=8),
        accumulate=as_count(data.get("gradient_accumulation_steps")),
        precision=next((name for name in ("bf16", "fp16") if as_bool(data.get(name, False))), "fp32"),
        recompute="full" if recomputes else "none",
        offload_states="offload" in words,
        compile="inductor" if as_bool(data.get("torch_compile")) else "none",
    )
    left_out = ["deepspeed: read that file too"] if isinstance(deepspeed, str) and deepspeed else []
    return ForeignSetup(
        tool="transformers",
        plan=plan,
        settings=flatten(data),
        foreign="deepspeed" if deepspeed else "",
        left_out=tuple(left_out),
        wraps=wraps,
    )


def _words(value: object) -> list[str]:
    """Return the words of `"full_shard auto_wrap"`, of a list, or of true."""
    if isinstance(value, bool):
        return ["full_shard"] if value else []
    parts = value if isinstance(value, list) else str(value or "").replace(",", " ").split()
    return [str(part).strip().lower() for part in parts]
