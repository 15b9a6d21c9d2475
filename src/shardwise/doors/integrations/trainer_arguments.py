"""Checks for TrainingArguments that belong in the plan, or to another engine."""

from dataclasses import replace
from typing import Any

from shardwise.base.errors import InvalidPlan
from shardwise.doors.integrations.asked_plan import asked_plan
from shardwise.plan import Plan

# Setting → what to do instead. All of them are off by default.
_FOREIGN = {
    "fsdp": "remove fsdp=: the plan has the strategy, plan='fsdp'",
    "deepspeed": "remove deepspeed=: the plan has the strategy, such as plan='zero2'",
    "parallelism_config": "set plan.mesh",
    "ddp_find_unused_parameters": "leave it out: unused parameters are found",
    "ddp_bucket_cap_mb": "set plan.bucket_bytes",
    "ddp_broadcast_buffers": "leave it out: buffers come from rank 0",
    "ddp_static_graph": "leave it out",
    "torch_compile": "set plan.compile = 'inductor'",
    "auto_find_batch_size": "find it with `shardwise plan`",
    "fp16": "use bf16=True",
    "fp16_full_eval": "a prepared model cannot be cast; set plan.precision",
    "bf16_full_eval": "a prepared model cannot be cast; set plan.precision = 'bf16'",
}


def checked_plan(args: Any, *, plan: Plan | str) -> Plan:
    """Return the plan that is asked for; raise InvalidPlan for arguments that contradict it."""
    for name, instead in _FOREIGN.items():
        value = getattr(args, name, None)
        if value is not None and value is not False and value != [] and value != "":
            raise InvalidPlan(f"TrainingArguments({name}={value!r}) with Shardwise: {instead}")
    if args.n_gpu > 1:
        raise InvalidPlan(
            f"one process sees {args.n_gpu} GPUs, for which the Trainer takes DataParallel: start one process per GPU "
            "(torchrun --nproc-per-node)"
        )
    said, accumulate = args.mixed_precision, args.gradient_accumulation_steps
    checked = asked_plan(plan, said=said, setting=f"TrainingArguments({said}=True)", accumulate=accumulate)
    if checked.micro_batch not in (None, args.per_device_train_batch_size):
        raise InvalidPlan(
            f"plan.micro_batch = {checked.micro_batch} with per_device_train_batch_size = "
            f"{args.per_device_train_batch_size}: they must be the same, or leave micro_batch out"
        )
    # The Trainer accumulates by itself, whatever the accelerator's setting.
    return replace(checked, accumulate=1)
