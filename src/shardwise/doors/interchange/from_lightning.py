"""Reads the settings of a Lightning Trainer from YAML: `trainer:` of LightningCLI, or the arguments alone."""

from collections.abc import Mapping
from typing import Any

from shardwise.doors.interchange.foreign_setup import FSDP_STRATEGIES, ZERO_STAGES, ForeignSetup, units_of
from shardwise.doors.interchange.setting_values import Settings
from shardwise.plan import Plan

_KEYS = ("accumulate_grad_batches", "devices", "precision", "strategy", "max_epochs", "num_nodes", "max_steps")
_OPTIONS = "strategy.init_args"
# Precision → (what is computed in, dtype of the weights).
_PRECISIONS: Mapping[Any, tuple[str, str]] = {
    **dict.fromkeys(("32-TRUE", "32", 32, "64-TRUE", "64", 64), ("fp32", "fp32")),
    **dict.fromkeys(("16-MIXED", "16", 16), ("fp16", "fp32")),
    **dict.fromkeys(("BF16-MIXED", "BF16"), ("bf16", "fp32")),
    "16-TRUE": ("fp16", "fp16"),
    "BF16-TRUE": ("bf16", "bf16"),
    **dict.fromkeys(("TRANSFORMER-ENGINE", "TRANSFORMER-ENGINE-FLOAT16"), ("fp32", "fp32")),
}
_KNOWN = ("auto", "single", "ddp", "fsdp", "modelparallel", "deepspeed")
# Lightning's names of strategies that shard parameters.
_SHARDING = ("ModelParallelStrategy", "fsdp", "fsdp_cpu_offload")
_DEEPSPEED = {
    "DEEPSPEED": "zero2",
    **{f"DEEPSPEED_STAGE_{stage}": ZERO_STAGES[stage] for stage in (1, 2, 3)},
    **{f"DEEPSPEED_STAGE_{stage}_OFFLOAD": ZERO_STAGES[stage] for stage in (2, 3)},
    "DEEPSPEED_STAGE_3_OFFLOAD_NVME": ZERO_STAGES[3],
}


def from_lightning(data: Mapping[str, Any]) -> ForeignSetup | None:
    """Return the setup; None if the file is not Lightning's."""
    table = data.get("trainer", data)
    if not isinstance(table, Mapping) or sum(key in table for key in _KEYS) < 2:
        return None
    settings = Settings(table)
    named = _named(settings)
    sharded = named.lower().startswith("fsdp")
    # A policy may also be a table, which names no classes here.
    wraps_nothing = sharded and not settings.has(f"{_OPTIONS}.auto_wrap_policy")
    policy = settings.values.get(f"{_OPTIONS}.auto_wrap_policy")
    wraps = settings.class_names(f"{_OPTIONS}.auto_wrap_policy") or None if policy is not None else None
    num_devices = _num_devices(settings)
    precision, master_dtype = settings.one_of("precision", _PRECISIONS, default=("fp32", "fp32"))
    offloads = f"{_OPTIONS}.cpu_offload"
    plan = Plan(
        strategy=_our_name(named, settings),
        # Without a policy, FSDP wraps only the root.
        units=units_of(wraps, wraps_nothing=wraps_nothing) if sharded else "auto",
        accumulate=settings.count("accumulate_grad_batches"),
        precision=precision,
        recompute="full" if settings.has(f"{_OPTIONS}.activation_checkpointing_policy") else "none",
        offload_states="offload" in named
        or (settings.switch(offloads) if offloads in settings.values else settings.has(offloads)),
    )
    return ForeignSetup(
        tool="lightning",
        plan=plan,
        settings=settings,
        num_ranks=num_devices * settings.count("num_nodes") or None,
        foreign="deepspeed" if "deepspeed" in named.lower() else "",
        left_out=() if named.lower().startswith(_KNOWN) else (f"strategy {named}: a plan has DDP and sharding",),
        master_dtype=master_dtype,
        wraps=wraps,
    )


def _named(settings: Settings) -> str:
    """Return the name of the strategy: a word, or the class in a table."""
    if settings.has("strategy") and "strategy" not in settings.values:
        return settings.text("strategy.class_path", default="").rpartition(".")[2]
    return settings.text("strategy", default="auto")


def _num_devices(settings: Settings) -> int:
    """Return the devices of a machine; 0 for all that it has."""
    value = settings.values.get("devices", 1)
    if isinstance(value, list):
        return len(value)
    if isinstance(value, str):
        # "8" is eight devices, "0,1" are two.
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if parts and all(part.isdecimal() for part in parts):
            return int(parts[0]) if len(parts) == 1 else len(parts)
    return 0 if value in (-1, "-1") else settings.count("devices", default=0)


def _our_name(named: str, settings: Settings) -> str:
    if named == "FSDPStrategy":
        return settings.one_of(f"{_OPTIONS}.sharding_strategy", FSDP_STRATEGIES, default="fsdp")
    if named == "DeepSpeedStrategy":
        return settings.one_of(f"{_OPTIONS}.stage", ZERO_STAGES, default="zero2")
    if named.startswith("deepspeed"):
        return settings.one_of("strategy", _DEEPSPEED, default="zero2")
    return "fsdp" if named in _SHARDING else "ddp"
