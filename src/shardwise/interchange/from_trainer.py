"""Reads arguments of Hugging Face's Trainer (TrainingArguments) from JSON or YAML."""

from collections.abc import Mapping
from typing import Any

from shardwise.interchange.foreign_setup import ZERO_STAGES, ForeignSetup, count, flat, names, truth, units_of
from shardwise.plan import Plan

_KEYS = ("per_device_train_batch_size", "output_dir", "num_train_epochs", "learning_rate")


def is_trainer(data: Mapping[str, Any]) -> bool:
    return "per_device_train_batch_size" in data or sum(key in data for key in _KEYS) >= 2


def from_trainer(data: Mapping[str, Any]) -> ForeignSetup:
    words = _words(data.get("fsdp", ""))
    given = data.get("fsdp_config")
    config: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    deepspeed = data.get("deepspeed")
    wraps = names(config.get("transformer_layer_cls_to_wrap", data.get("fsdp_transformer_layer_cls_to_wrap"))) or None
    sharded = bool(words) and not deepspeed
    wraps_nothing = sharded and "auto_wrap" not in words and wraps is None and not config.get("auto_wrap_policy")
    strategy = "ddp"
    if sharded:
        strategy = "shard_grad_op" if {"shard_grad_op", "hybrid_shard_zero2"} & set(words) else "fsdp"
        if count(config.get("version", config.get("fsdp_version"))) == 2:
            strategy = "fsdp" if truth(config.get("reshard_after_forward", True)) else "shard_grad_op"
    elif isinstance(deepspeed, Mapping):
        stage = flat(deepspeed).get("zero_optimization.stage", 0)
        strategy = ZERO_STAGES.get(stage if isinstance(stage, int) else 0, "ddp")
    switches = (data.get("gradient_checkpointing", False), config.get("activation_checkpointing", False))
    plan = Plan(
        strategy=strategy,
        units=units_of(wraps, wraps_nothing=wraps_nothing) if sharded else "auto",
        micro_batch=count(data.get("per_device_train_batch_size"), default=8),
        accumulate=count(data.get("gradient_accumulation_steps")),
        precision=next((name for name in ("bf16", "fp16") if truth(data.get(name, False))), "fp32"),
        recompute="full" if any(map(truth, switches)) else "none",
        offload_states="offload" in words,
        compile="inductor" if truth(data.get("torch_compile", False)) else "none",
        engine="shardwise" if deepspeed else "torch",
        capture="off",
    )
    left_out = ["deepspeed: read that file too"] if isinstance(deepspeed, str) and deepspeed else []
    return ForeignSetup(
        tool="transformers",
        plan=plan,
        settings=flat(data),
        foreign="deepspeed" if deepspeed else "",
        left_out=tuple(left_out),
        wraps=wraps,
        wraps_nothing=wraps_nothing,
    )


def _words(value: object) -> list[str]:
    """Return the words of `"full_shard auto_wrap"`, of a list, or of true."""
    if isinstance(value, bool):
        return ["full_shard"] if value else []
    parts = value if isinstance(value, list) else str(value or "").replace(",", " ").split()
    return [str(part).strip().lower() for part in parts]
