"""Reads a config file of Accelerate."""

from collections.abc import Mapping
from typing import Any

from shardwise.interchange.foreign_setup import FSDP_STRATEGIES, ZERO_STAGES, ForeignSetup, units_of
from shardwise.interchange.setting_values import as_bool, as_count, class_names, flatten
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh

_PRECISIONS = {"bf16": "bf16", "fp16": "fp16"}
# By name, or by number in older files.
_SHARDING = FSDP_STRATEGIES | {str(number): name for number, name in enumerate(FSDP_STRATEGIES.values(), start=1)}


def from_accelerate(data: Mapping[str, Any]) -> ForeignSetup | None:
    """Return the setup; None if the file is not Accelerate's."""
    if "distributed_type" not in data and "compute_environment" not in data:
        return None
    kind = str(data.get("distributed_type", "NO")).upper()
    fsdp = _table(data, "fsdp_config") if kind == "FSDP" else {}
    deepspeed = _table(data, "deepspeed_config") if kind == "DEEPSPEED" else {}
    strategy, left_out, wraps, wraps_nothing = "ddp", [], None, False
    if kind == "FSDP":
        strategy = _strategy(fsdp)
        wraps, wraps_nothing = _wraps(fsdp)
    elif kind == "DEEPSPEED":
        strategy = ZERO_STAGES.get(as_count(deepspeed.get("zero_stage"), default=2), "zero2")
        if "deepspeed_config_file" in deepspeed:
            left_out.append("deepspeed_config_file: read that file instead")
    elif kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        left_out.append(f"distributed_type {kind}: a plan has DDP and sharding")
    num_ranks = as_count(data.get("num_processes"))
    plan = Plan(
        strategy=strategy,
        units=units_of(wraps, wraps_nothing=wraps_nothing),
        mesh=_mesh(_table(data, "parallelism_config"), num_ranks=num_ranks) if kind == "FSDP" else None,
        precision=_PRECISIONS.get(str(data.get("mixed_precision", "no")).lower(), "fp32"),
        accumulate=as_count(deepspeed.get("gradient_accumulation_steps")),
        recompute="full" if as_bool(fsdp.get("fsdp_activation_checkpointing")) else "none",
        offload_states=as_bool(fsdp.get("fsdp_offload_params"))
        or str(deepspeed.get("offload_optimizer_device", "none")) == "cpu",
    )
    return ForeignSetup(
        tool="accelerate",
        plan=plan,
        settings=flatten(data),
        num_ranks=num_ranks,
        foreign="deepspeed" if kind == "DEEPSPEED" else "",
        left_out=tuple(left_out),
        wraps=wraps,
    )


def _table(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key)
    return value if isinstance(value, Mapping) else {}


def _strategy(fsdp: Mapping[str, Any]) -> str:
    """Return the strategy. Version 1 names it (some files under version 2's key), version 2 has a switch."""
    if as_count(fsdp.get("fsdp_version")) == 2:
        return "fsdp" if as_bool(fsdp.get("fsdp_reshard_after_forward", True)) else "shard_grad_op"
    named = fsdp.get("fsdp_sharding_strategy", fsdp.get("fsdp_reshard_after_forward", "FULL_SHARD"))
    return _SHARDING.get(str(named).upper(), "fsdp")


def _wraps(fsdp: Mapping[str, Any]) -> tuple[tuple[str, ...] | None, bool]:
    """Return (the wrapped classes, whether nothing is wrapped)."""
    policy = str(fsdp.get("fsdp_auto_wrap_policy", "NO_WRAP")).upper()
    if policy == "TRANSFORMER_BASED_WRAP":
        return class_names(fsdp.get("fsdp_transformer_layer_cls_to_wrap")) or None, False
    return None, policy == "NO_WRAP"


def _mesh(parallelism: Mapping[str, Any], *, num_ranks: int) -> Mesh | None:
    replicate = as_count(parallelism.get("parallelism_config_dp_replicate_size"))
    if replicate == 1 or num_ranks % replicate:
        return None
    return Mesh(replicate=replicate, shard=num_ranks // replicate)
