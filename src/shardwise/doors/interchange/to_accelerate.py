"""Writes a plan as a config file of Accelerate: `accelerate launch --config_file accelerate.yaml SCRIPT`."""

from typing import Any

import yaml

from shardwise.doors.interchange.exported import Exported, JobShape, file_header, host_notes, not_expressed
from shardwise.plan import Plan
from shardwise.plan.patterns import Cut, UnitPolicy
from shardwise.plan.placement import placement_of

_MIXED = {"fp32": "no", "bf16": "bf16", "fp16": "fp16", "native": "no"}
_STAGES = {"zero1": 1, "zero2": 2}
_EXPRESSED = {"strategy", "units", "micro_batch", "accumulate", "precision", "recompute", "compile"}


def to_accelerate(plan: Plan, shape: JobShape) -> Exported:
    """Write `ddp` as DistributedDataParallel, `zero1` and `zero2` as DeepSpeed's stages, the sharded ones as FSDP2."""
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "mixed_precision": _MIXED[plan.precision],
        "num_machines": shape.num_nodes,
        "num_processes": shape.num_ranks,
        "machine_rank": 0,
        "main_training_function": "main",
    }
    expressed, notes = set(_EXPRESSED), []
    if plan.strategy in _STAGES:
        expressed |= {"offload_states", "offload_update"}
        config |= {"distributed_type": "DEEPSPEED", "deepspeed_config": _deepspeed(plan)}
        notes.append(f"{plan.strategy} is DeepSpeed's stage {_STAGES[plan.strategy]} here: pip install deepspeed")
    elif placement_of(plan.strategy).params.is_sharded:
        expressed |= {"mesh", "offload_states", "offload_update"}
        config |= {"distributed_type": "FSDP", "fsdp_config": _fsdp(plan)}
        if plan.mesh is not None and plan.mesh.replicate > 1:
            config["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": plan.mesh.replicate,
                "parallelism_config_dp_shard_size": plan.mesh.shard,
            }
    elif plan.mesh is not None:
        expressed.add("mesh")
    if plan.compiler != "none":
        config["dynamo_config"] = {"dynamo_backend": plan.compiler.upper(), "dynamo_use_regional_compilation": True}
    left_out = not_expressed(plan, target="Accelerate", expressed=expressed)
    left_out += host_notes(plan, target="Accelerate") if "offload_states" in expressed else []
    if plan.recompute == "selective":
        left_out.append("recompute = selective: Accelerate recomputes whole layers; this file turns it off")
    elif plan.recompute == "full" and not placement_of(plan.strategy).params.is_sharded:
        left_out.append("recompute = full: call model.gradient_checkpointing_enable() in the script")
    if plan.accumulate > 1:
        notes.append(f"in the script: Accelerator(gradient_accumulation_steps={plan.accumulate})")
    if plan.micro_batch is not None:
        notes.append(f"in the script: DataLoader(batch_size={plan.micro_batch})")
    if shape.num_nodes > 1:
        notes.append("on each machine: --machine_rank N --main_process_ip ADDRESS --main_process_port PORT")
    header = file_header("accelerate launch --config_file accelerate.yaml SCRIPT", *notes, left_out=left_out)
    text = header + yaml.safe_dump(config, sort_keys=False)
    return Exported(files={"accelerate.yaml": text}, left_out=tuple(left_out))


def _deepspeed(plan: Plan) -> dict[str, Any]:
    return {
        "zero_stage": _STAGES[plan.strategy],
        "gradient_accumulation_steps": plan.accumulate,
        "offload_optimizer_device": "cpu" if plan.offload_states else "none",
        "offload_param_device": "none",
    }


def _fsdp(plan: Plan) -> dict[str, Any]:
    policy = UnitPolicy.parse(plan.units)
    found: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": placement_of(plan.strategy).reshard_after_forward,
        "fsdp_offload_params": bool(plan.offload_states),
        "fsdp_activation_checkpointing": plan.recompute == "full",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    if policy.cut is Cut.NOTHING:
        found["fsdp_auto_wrap_policy"] = "NO_WRAP"
    elif policy.cut is Cut.MIN_PARAMS:
        found |= {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": policy.min_params}
    else:
        # Without class names, Accelerate uses the model's own list of layers (_no_split_modules).
        found["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
        if policy.class_names:
            found["fsdp_transformer_layer_cls_to_wrap"] = ",".join(policy.class_names)
    return found
