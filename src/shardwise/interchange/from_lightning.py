"""Reads the settings of a Lightning Trainer from YAML: `trainer:` of LightningCLI, or the arguments alone."""

from collections.abc import Mapping
from typing import Any

from shardwise.interchange.foreign_setup import FSDP_STRATEGIES, ZERO_STAGES, ForeignSetup, units_of
from shardwise.interchange.setting_values import as_bool, as_count, class_names, flatten
from shardwise.plan import Plan

_KEYS = ("accumulate_grad_batches", "devices", "precision", "strategy", "max_epochs", "num_nodes", "max_steps")


def from_lightning(data: Mapping[str, Any]) -> ForeignSetup | None:
    """Return the setup; None if the file is not Lightning's."""
    table = data.get("trainer", data)
    if not isinstance(table, Mapping) or sum(key in table for key in _KEYS) < 2:
        return None
    named, options = _strategy(table.get("strategy", "auto"))
    sharded = named.lower().startswith("fsdp")
    wraps = class_names(options.get("auto_wrap_policy")) or None
    # Without a policy, FSDP wraps only the root.
    wraps_nothing = sharded and not options.get("auto_wrap_policy")
    devices = table.get("devices", 1)
    num_devices = len(devices) if isinstance(devices, list) else as_count(devices, default=0)
    precision = str(table.get("precision", "32-true"))
    plan = Plan(
        strategy=_our_name(named, options),
        units=units_of(wraps, wraps_nothing=wraps_nothing) if sharded else "auto",
        accumulate=as_count(table.get("accumulate_grad_batches")),
        precision="bf16" if precision.startswith("bf16") else "fp16" if precision.startswith("16") else "fp32",
        recompute="full" if options.get("activation_checkpointing_policy") else "none",
        offload_states=as_bool(options.get("cpu_offload")) or "offload" in named,
    )
    return ForeignSetup(
        tool="lightning",
        plan=plan,
        settings=flatten(table),
        num_ranks=num_devices * as_count(table.get("num_nodes")) or None,
        foreign="deepspeed" if "deepspeed" in named.lower() else "",
        master_dtype="bf16" if precision == "bf16-true" else "fp16" if precision == "16-true" else "fp32",
        wraps=wraps,
    )


def _strategy(value: object) -> tuple[str, Mapping[str, Any]]:
    """Return (the name, the arguments) of a strategy."""
    if isinstance(value, Mapping):
        options = value.get("init_args", {})
        return str(value.get("class_path", "")).rpartition(".")[2], options if isinstance(options, Mapping) else {}
    return str(value), {}


# Lightning's names of strategies that shard parameters.
_SHARDING_STRATEGIES = dict.fromkeys(("ModelParallelStrategy", "fsdp", "fsdp_cpu_offload"), "fsdp")


def _our_name(named: str, options: Mapping[str, Any]) -> str:
    if named == "FSDPStrategy":
        return FSDP_STRATEGIES.get(str(options.get("sharding_strategy", "FULL_SHARD")).upper().lstrip("_"), "fsdp")
    if named in _SHARDING_STRATEGIES:
        return _SHARDING_STRATEGIES[named]
    if named == "DeepSpeedStrategy":
        return ZERO_STAGES.get(as_count(options.get("stage"), default=2), "zero2")
    stage = named.removeprefix("deepspeed_stage_").removesuffix("_offload")
    return ZERO_STAGES.get(as_count(stage, default=0), "ddp")
