"""Reads a config file of DeepSpeed."""

from collections.abc import Mapping
from typing import Any

from shardwise.doors.interchange.foreign_setup import ZERO_STAGES, ForeignSetup
from shardwise.doors.interchange.setting_values import Settings
from shardwise.plan import Plan
from shardwise.plan.placement import ACROSS, Mesh

_REDUCES_IN = {"FP16": "fp16", "BFP16": "bf16", "BF16": "bf16", "FP32": "fp32"}
_OFFLOADS = {"NONE": False, "CPU": True, "NVME": True}
_KEYS = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")


def from_deepspeed(data: Mapping[str, Any]) -> ForeignSetup | None:
    """Return the setup; None if the file is not DeepSpeed's."""
    if not any(key in data for key in _KEYS):
        return None
    settings = Settings(data)
    strategy = settings.one_of("zero_optimization.stage", ZERO_STAGES, default="ddp")
    precision = next((name for name in ("bf16", "fp16") if settings.switch(f"{name}.enabled")), "fp32")
    accumulate = settings.count("gradient_accumulation_steps")
    micro_batch = settings.count("train_micro_batch_size_per_gpu", default=0)
    total = settings.count("train_batch_size", default=0)
    num_ranks = None
    if micro_batch and total and total % (micro_batch * accumulate) == 0:
        num_ranks = total // (micro_batch * accumulate)
    hpz = settings.count("zero_optimization.zero_hpz_partition_size")
    on_mesh: dict[str, Any] = {}
    if strategy == ZERO_STAGES[3] and hpz > 1 and num_ranks and num_ranks > hpz and num_ranks % hpz == 0:
        on_mesh = {"mesh": Mesh(replicate=num_ranks // hpz, shard=hpz), "across": ACROSS[-1]}
    plan = Plan(
        **on_mesh,
        strategy=strategy,
        micro_batch=micro_batch or None,
        accumulate=accumulate,
        # Stages 2 and 3 reduce in every pass, since a rank keeps only its own slice.
        accumulate_reduced=accumulate > 1 and strategy in (ZERO_STAGES[2], ZERO_STAGES[3]),
        precision=precision,
        # DeepSpeed's default is to reduce in the dtype of the computation.
        reduce_dtype=settings.one_of("communication_data_type", _REDUCES_IN, default=precision),
        offload_states=settings.one_of("zero_optimization.offload_optimizer.device", _OFFLOADS, default=False),
    )
    left_out = [f"{key}: a plan cannot express it" for key in data if key in ("sparse_attention", "autotuning", "moe")]
    return ForeignSetup(
        tool="deepspeed",
        plan=plan,
        settings=settings,
        num_ranks=num_ranks,
        foreign="deepspeed",
        left_out=tuple(left_out),
    )
