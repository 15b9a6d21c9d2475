"""Settings of a Lightning Trainer, as YAML: `trainer:` of LightningCLI, or the arguments alone."""

from collections.abc import Mapping
from typing import Any

from shardwise.interchange.foreign_setup import ForeignSetup, count, flat, names, truth, units_of
from shardwise.plan import Plan

_KEYS = ("accumulate_grad_batches", "devices", "precision", "strategy", "max_epochs", "num_nodes", "max_steps")
_SHARDING = {
    "FULL_SHARD": "fsdp",
    "HYBRID_SHARD": "fsdp",
    "NO_SHARD": "ddp",
    "SHARD_GRAD_OP": "shard_grad_op",
    "_HYBRID_SHARD_ZERO2": "shard_grad_op",
}
_NAMED = {
    "fsdp": "fsdp",
    "fsdp_cpu_offload": "fsdp",
    "deepspeed_stage_1": "zero1",
    "deepspeed_stage_2": "zero2",
    "deepspeed_stage_2_offload": "zero2",
    "deepspeed_stage_3": "fsdp",
    "deepspeed_stage_3_offload": "fsdp",
}


def is_lightning(data: Mapping[str, Any]) -> bool:
    table = data.get("trainer", data)
    return isinstance(table, Mapping) and sum(key in table for key in _KEYS) >= 2


def from_lightning(data: Mapping[str, Any]) -> ForeignSetup:
    table = data.get("trainer", data)
    named, options = _strategy(table.get("strategy", "auto"))
    sharded = named.lower().startswith("fsdp")
    wraps = names(options.get("auto_wrap_policy")) or None
    # Without a policy FSDP wraps the module as a whole.
    wraps_nothing = sharded and not options.get("auto_wrap_policy")
    devices = table.get("devices", 1)
    num_devices = len(devices) if isinstance(devices, list) else count(devices, default=0)
    precision = str(table.get("precision", "32-true"))
    plan = Plan(
        strategy=_our_name(named, options),
        units=units_of(wraps, wraps_nothing=wraps_nothing) if sharded else "auto",
        accumulate=count(table.get("accumulate_grad_batches")),
        precision="bf16" if precision.startswith("bf16") else "fp16" if precision.startswith("16") else "fp32",
        recompute="full" if options.get("activation_checkpointing_policy") else "none",
        offload_states=truth(options.get("cpu_offload", False)) or "offload" in named,
        engine="shardwise" if "deepspeed" in named.lower() else "torch",
        capture="off",
    )
    return ForeignSetup(
        tool="lightning",
        plan=plan,
        settings=flat(table),
        num_ranks=num_devices * count(table.get("num_nodes")) or None,
        foreign="deepspeed" if "deepspeed" in named.lower() else "",
        master_dtype="bf16" if precision == "bf16-true" else "fp16" if precision == "16-true" else "fp32",
        wraps=wraps,
        wraps_nothing=wraps_nothing,
    )


def _strategy(value: object) -> tuple[str, Mapping[str, Any]]:
    """(its name, its arguments)."""
    if isinstance(value, Mapping):
        options = value.get("init_args", {})
        return str(value.get("class_path", "")).rpartition(".")[2], options if isinstance(options, Mapping) else {}
    return str(value), {}


def _our_name(named: str, options: Mapping[str, Any]) -> str:
    if named == "FSDPStrategy":
        return _SHARDING.get(str(options.get("sharding_strategy", "FULL_SHARD")).upper(), "fsdp")
    if named == "ModelParallelStrategy":
        return "fsdp"
    if named == "DeepSpeedStrategy":
        return {1: "zero1", 2: "zero2", 3: "fsdp"}.get(count(options.get("stage"), default=2), "zero2")
    return _NAMED.get(named, "ddp")
