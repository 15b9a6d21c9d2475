"""Reads a job file of torchtitan."""

from collections.abc import Mapping
from typing import Any

from shardwise.doors.interchange.foreign_setup import ForeignSetup
from shardwise.doors.interchange.setting_values import Settings
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh

_DTYPES = {"FLOAT32": "fp32", "BFLOAT16": "bf16", "FLOAT16": "fp16"}
_RESHARDS = {"DEFAULT": "fsdp", "ALWAYS": "fsdp", "NEVER": "shard_grad_op"}
_RECOMPUTES = {"NONE": "none", "FULL": "full", "SELECTIVE": "selective", "MEMORY_BUDGET": "none"}
_OTHER_AXES = ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree")


def is_torchtitan(data: Mapping[str, Any]) -> bool:
    return "training" in data and ("parallelism" in data or "job" in data)


def from_torchtitan(data: Mapping[str, Any]) -> ForeignSetup | None:
    """Return the setup; None if the file is not torchtitan's."""
    if not is_torchtitan(data):
        return None
    settings = Settings(data)
    replicate = settings.count("parallelism.data_parallel_replicate_degree")
    shard = or_rest(settings, "parallelism.data_parallel_shard_degree")
    strategy = settings.one_of("parallelism.fsdp_reshard_after_forward", _RESHARDS, default="fsdp")
    num_ranks = replicate * shard if shard else None
    old_names = {"training.local_batch_size": "training.batch_size", "compile.enable": "training.compile"}
    batch, compiles = (name if settings.has(name) else old for name, old in old_names.items())
    micro_batch = settings.count(batch, default=0)
    plan = Plan(
        strategy="ddp" if shard == 1 else strategy,
        mesh=Mesh(replicate=replicate, shard=shard) if shard > 1 and replicate > 1 else None,
        micro_batch=micro_batch or None,
        accumulate=_passes(settings, micro_batch=micro_batch, num_ranks=num_ranks),
        precision=settings.one_of("training.mixed_precision_param", _DTYPES, default="bf16"),
        reduce_dtype=settings.one_of("training.mixed_precision_reduce", _DTYPES, default="fp32"),
        recompute=settings.one_of("activation_checkpoint.mode", _RECOMPUTES, default="selective"),
        offload_states=settings.switch("training.enable_cpu_offload"),
        compile="inductor" if settings.switch(compiles) else "none",
    )
    left_out = [
        f"parallelism.{axis} = {degree}: a plan has no such axis"
        for axis in _OTHER_AXES
        if (degree := settings.count(f"parallelism.{axis}")) > 1
    ]
    return ForeignSetup(
        tool="torchtitan",
        plan=plan,
        settings=settings,
        num_ranks=num_ranks,
        left_out=tuple(left_out),
        master_dtype=settings.one_of("training.dtype", _DTYPES, default="fp32"),
    )


def _passes(settings: Settings, *, micro_batch: int, num_ranks: int | None) -> int:
    total = or_rest(settings, "training.global_batch_size")
    if not (total and micro_batch and num_ranks):
        return 1
    return max(1, total // (micro_batch * num_ranks))


def or_rest(settings: Settings, name: str) -> int:
    """Return a count; 0 for −1, which stands for what the other settings leave."""
    return 0 if settings.values.get(name) == -1 else settings.count(name, default=0)
