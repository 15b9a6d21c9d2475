"""Reads a config file of Accelerate."""

from collections.abc import Mapping
from typing import Any

from shardwise.doors.interchange.foreign_setup import FSDP_STRATEGIES, ZERO_STAGES, ForeignSetup, units_of
from shardwise.doors.interchange.setting_values import Settings
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh

_PRECISIONS = {"NO": "fp32", "FALSE": "fp32", "FP16": "fp16", "BF16": "bf16", "FP8": "fp32"}
# Version 2 has a switch, version 1 names, and older files have numbers.
_SHARDING: Mapping[Any, str] = {
    "TRUE": "fsdp",
    "FALSE": "shard_grad_op",
    **FSDP_STRATEGIES,
    **dict(enumerate(FSDP_STRATEGIES.values(), start=1)),
    **{str(number): name for number, name in enumerate(FSDP_STRATEGIES.values(), start=1)},
}
_POLICIES = {name: name for name in ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")}
_OFFLOADS = {"NONE": False, "CPU": True, "NVME": False}


def from_accelerate(data: Mapping[str, Any]) -> ForeignSetup | None:
    """Return the setup; None if the file is not Accelerate's."""
    if "distributed_type" not in data and "compute_environment" not in data:
        return None
    settings = Settings(data)
    # YAML reads an unquoted NO as false.
    kind = "NO" if data.get("distributed_type") is False else settings.text("distributed_type", default="NO").upper()
    strategy, left_out, wraps, wraps_nothing = "ddp", [], None, False
    num_ranks, accumulate, recomputes, offloads, mesh = settings.count("num_processes"), 1, False, False, None
    if kind == "FSDP":
        strategy = _strategy(settings)
        wraps, wraps_nothing = _wraps(settings)
        recomputes = settings.switch("fsdp_config.fsdp_activation_checkpointing")
        offloads = settings.switch("fsdp_config.fsdp_offload_params")
        mesh = _mesh(settings, num_ranks=num_ranks)
    elif kind == "DEEPSPEED":
        strategy = settings.one_of("deepspeed_config.zero_stage", ZERO_STAGES, default="zero2")
        accumulate = settings.count("deepspeed_config.gradient_accumulation_steps")
        offloads = settings.one_of("deepspeed_config.offload_optimizer_device", _OFFLOADS, default=False)
        if settings.has("deepspeed_config.deepspeed_config_file"):
            left_out.append("deepspeed_config_file: read that file instead")
    elif kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        left_out.append(f"distributed_type {kind}: a plan has DDP and sharding")
    plan = Plan(
        strategy=strategy,
        units=units_of(wraps, wraps_nothing=wraps_nothing),
        mesh=mesh,
        precision=settings.one_of("mixed_precision", _PRECISIONS, default="fp32"),
        accumulate=accumulate,
        recompute="full" if recomputes else "none",
        offload_states=offloads,
    )
    if settings.values.get("mixed_precision") == "fp8":
        left_out.append("mixed_precision fp8: a plan names the layers")
    return ForeignSetup(
        tool="accelerate",
        plan=plan,
        settings=settings,
        num_ranks=num_ranks,
        foreign="deepspeed" if kind == "DEEPSPEED" else "",
        left_out=tuple(left_out),
        wraps=wraps,
    )


def _strategy(settings: Settings) -> str:
    """Return the strategy. Version 1 names it (some files under version 2's key), version 2 has a switch."""
    is_second = settings.one_of("fsdp_config.fsdp_version", {1: False, 2: True}, default=False)
    names_it = not is_second and "fsdp_config.fsdp_sharding_strategy" in settings.values
    key = "fsdp_sharding_strategy" if names_it else "fsdp_reshard_after_forward"
    return settings.one_of(f"fsdp_config.{key}", _SHARDING, default="fsdp")


def _wraps(settings: Settings) -> tuple[tuple[str, ...] | None, bool]:
    """Return (the wrapped classes, whether nothing is wrapped)."""
    policy = settings.one_of("fsdp_config.fsdp_auto_wrap_policy", _POLICIES, default="NO_WRAP")
    if policy == "TRANSFORMER_BASED_WRAP":
        return settings.class_names("fsdp_config.fsdp_transformer_layer_cls_to_wrap") or None, False
    return None, policy == "NO_WRAP"


def _mesh(settings: Settings, *, num_ranks: int) -> Mesh | None:
    replicate = settings.count("parallelism_config.parallelism_config_dp_replicate_size")
    if replicate == 1 or num_ranks % replicate:
        return None
    return Mesh(replicate=replicate, shard=num_ranks // replicate)
