"""Writes a plan as a job file of torchtitan: `torchrun … -m torchtitan.train --job.config_file torchtitan.toml`."""

from typing import Any

from shardwise.doors.interchange.exported import Exported, JobShape, file_header, host_notes, not_expressed
from shardwise.plan import Plan
from shardwise.plan.placement import placement_of

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "native": "float32"}
_EXPRESSED = {
    *("strategy", "units", "mesh", "micro_batch", "accumulate", "precision", "reduce_dtype", "recompute"),
    *("offload_states", "offload_update", "compile"),
}


def to_torchtitan(plan: Plan, shape: JobShape) -> Exported:
    import tomli_w

    sharded = placement_of(plan.strategy).params.is_sharded
    left_out = not_expressed(plan, target="torchtitan", expressed=_EXPRESSED)
    left_out += host_notes(plan, target="torchtitan")
    if placement_of(plan.strategy).optim.is_sharded and not sharded:
        left_out.append(f"strategy = {plan.strategy}: torchtitan has DDP and FSDP2; this file says DDP")
    if plan.units != "auto":
        left_out.append(f"units = {plan.units}: torchtitan wraps each transformer block")
    replicate = plan.mesh.replicate if plan.mesh is not None and sharded else 1 if sharded else shape.num_ranks
    training: dict[str, Any] = {
        "mixed_precision_param": _DTYPES[plan.precision],
        "mixed_precision_reduce": _DTYPES[plan.reduce_dtype],
        "enable_cpu_offload": bool(plan.offload_states),
    }
    if plan.micro_batch is not None:
        training["local_batch_size"] = plan.micro_batch
        training["global_batch_size"] = plan.micro_batch * plan.accumulate * shape.num_ranks
    elif plan.accumulate > 1:
        left_out.append("accumulate: torchtitan takes a global batch, and the plan has no micro_batch to count from")
    config = {
        "training": training,
        "parallelism": {
            "data_parallel_replicate_degree": replicate,
            "data_parallel_shard_degree": shape.num_ranks // replicate,
            "fsdp_reshard_after_forward": "always" if placement_of(plan.strategy).reshard_after_forward else "never",
        },
        "activation_checkpoint": {"mode": plan.recompute},
        "compile": {"enable": plan.compiler != "none"},
    }
    header = file_header("Add [model], and pass --job.config_file torchtitan.toml.", left_out=left_out)
    return Exported(files={"torchtitan.toml": header + tomli_w.dumps(config)}, left_out=tuple(left_out))
