"""Reads a job file of torchtitan."""

from collections.abc import Mapping
from typing import Any

from shardwise.interchange.foreign_setup import ForeignSetup
from shardwise.interchange.setting_values import as_bool, as_count, flatten
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh

_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_OTHER_AXES = ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree")


def is_torchtitan(data: Mapping[str, Any]) -> bool:
    return "training" in data and ("parallelism" in data or "job" in data)


def from_torchtitan(data: Mapping[str, Any]) -> ForeignSetup | None:
    """Return the setup; None if the file is not torchtitan's."""
    if not is_torchtitan(data):
        return None
    settings = flatten(data)
    replicate = as_count(settings.get("parallelism.data_parallel_replicate_degree"))
    # −1 stands for all remaining ranks.
    shard = as_count(settings.get("parallelism.data_parallel_shard_degree", -1), default=0)
    strategy = "fsdp"
    if shard == 1:
        strategy = "ddp"
    elif str(settings.get("parallelism.fsdp_reshard_after_forward", "default")) == "never":
        strategy = "shard_grad_op"
    num_ranks = replicate * shard if shard else None
    micro_batch = as_count(settings.get("training.local_batch_size", settings.get("training.batch_size")), default=0)
    recompute = str(settings.get("activation_checkpoint.mode", "selective"))
    plan = Plan(
        strategy=strategy,
        mesh=Mesh(replicate=replicate, shard=shard) if shard > 1 and replicate > 1 else None,
        micro_batch=micro_batch or None,
        accumulate=_passes(settings, micro_batch=micro_batch, num_ranks=num_ranks),
        precision=_DTYPES.get(str(settings.get("training.mixed_precision_param", "bfloat16")), "bf16"),
        reduce_dtype=_DTYPES.get(str(settings.get("training.mixed_precision_reduce", "float32")), "fp32"),
        recompute=recompute if recompute in ("none", "full", "selective") else "none",
        offload_states=as_bool(settings.get("training.enable_cpu_offload")),
        compile="inductor"
        if as_bool(settings.get("compile.enable", settings.get("training.compile", False)))
        else "none",
    )
    left_out = [
        f"parallelism.{axis} = {settings[f'parallelism.{axis}']}: a plan has no such axis"
        for axis in _OTHER_AXES
        if as_count(settings.get(f"parallelism.{axis}")) > 1
    ]
    return ForeignSetup(
        tool="torchtitan",
        plan=plan,
        settings=settings,
        num_ranks=num_ranks,
        left_out=tuple(left_out),
        master_dtype=_DTYPES.get(str(settings.get("training.dtype", "float32")), "fp32"),
    )


def _passes(settings: Mapping[str, Any], *, micro_batch: int, num_ranks: int | None) -> int:
    total = as_count(settings.get("training.global_batch_size", -1), default=0)
    if not (total and micro_batch and num_ranks):
        return 1
    return max(1, total // (micro_batch * num_ranks))
