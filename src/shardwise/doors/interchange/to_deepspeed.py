"""Writes a plan as a config file of DeepSpeed: `deepspeed SCRIPT --deepspeed_config deepspeed.json`."""

import json
from typing import Any

from shardwise.doors.interchange.exported import Exported, JobShape, host_notes, not_expressed
from shardwise.plan import Plan
from shardwise.plan.placement import placement_of

_STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "shard_grad_op": 3, "fsdp": 3}
_REDUCES_IN = {"fp32": "fp32", "bf16": "bfp16", "fp16": "fp16"}
_EXPRESSED = {
    *("strategy", "micro_batch", "accumulate", "precision", "reduce_dtype", "mesh", "across", "units"),
    *("offload_states", "offload_update"),
}


def to_deepspeed(plan: Plan, shape: JobShape) -> Exported:
    zero: dict[str, Any] = {"stage": _STAGES[plan.strategy]}
    left_out = not_expressed(plan, target="DeepSpeed's file", expressed=_EXPRESSED)
    left_out += host_notes(plan, target="DeepSpeed")
    if not isinstance(plan.offload_states, bool) and zero["stage"] == 3:
        left_out.append("offload_optimizer.ratio: stage 3 can offload a share of the parameters; this file has none")
    if plan.offload_states:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if zero["stage"] == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if zero["stage"] == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    placement = placement_of(plan.strategy)
    if placement.params.is_sharded and not placement.reshard_after_forward:
        left_out.append(f"strategy = {plan.strategy}: stage 3 is the nearest; it gathers parameters again for backward")
    if plan.mesh is not None and plan.is_sharded_across:
        # ZeRO++: states over all ranks, and for backward a copy of the parameters that is gathered inside a group.
        zero["zero_hpz_partition_size"] = plan.mesh.shard
        if not placement_of(plan.strategy, across=plan.across).grads.is_sharded_across:
            left_out.append(f"across = {plan.across}: stage 3 shards gradients over all ranks too")
    elif plan.mesh is not None and plan.mesh.replicate > 1:
        # MiCS shards within groups, and replicates across them.
        zero["mics_shard_size"] = plan.mesh.shard
    config: dict[str, Any] = {
        "train_batch_size": (plan.micro_batch or 1) * plan.accumulate * shape.num_ranks,
        "train_micro_batch_size_per_gpu": plan.micro_batch or 1,
        "gradient_accumulation_steps": plan.accumulate,
        "communication_data_type": _REDUCES_IN[plan.reduce_dtype],
        "zero_optimization": zero,
    }
    if plan.micro_batch is None:
        left_out.append("micro_batch: the plan has none, and DeepSpeed needs one; this file says 1")
    if plan.precision in ("bf16", "fp16"):
        config[plan.precision] = {"enabled": True}
    if plan.units != "auto":
        left_out.append(f"units = {plan.units}: DeepSpeed gathers module by module, by its own rules")
    files = {"deepspeed.json": json.dumps(config, indent=2) + "\n"}
    if left_out:
        # JSON has no comments.
        files["deepspeed.notes.txt"] = "Not in deepspeed.json:\n" + "".join(f"- {line}\n" for line in left_out)
    return Exported(files=files, left_out=tuple(left_out))
