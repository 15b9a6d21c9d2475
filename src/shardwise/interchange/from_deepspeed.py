"""Reads a config file of DeepSpeed."""

from collections.abc import Mapping
from typing import Any

from shardwise.interchange.foreign_setup import ZERO_STAGES, ForeignSetup
from shardwise.interchange.setting_values import as_bool, as_count, flatten
from shardwise.plan import Plan

_REDUCES_IN = {"fp16": "fp16", "bfp16": "bf16", "bf16": "bf16", "fp32": "fp32"}
_KEYS = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")


def from_deepspeed(data: Mapping[str, Any]) -> ForeignSetup | None:
    """Return the setup; None if the file is not DeepSpeed's."""
    if not any(key in data for key in _KEYS):
        return None
    settings = flatten(data)
    stage = settings.get("zero_optimization.stage", 0)
    precision = next((name for name in ("bf16", "fp16") if as_bool(settings.get(f"{name}.enabled"))), "fp32")
    accumulate = as_count(data.get("gradient_accumulation_steps"))
    micro_batch = as_count(data.get("train_micro_batch_size_per_gpu"), default=0)
    total = as_count(data.get("train_batch_size"), default=0)
    num_ranks = None
    if micro_batch and total and total % (micro_batch * accumulate) == 0:
        num_ranks = total // (micro_batch * accumulate)
    # DeepSpeed's default is to reduce in the dtype of the computation.
    reduces_in = _REDUCES_IN.get(str(data.get("communication_data_type", precision)), "fp32")
    offloads = str(settings.get("zero_optimization.offload_optimizer.device", "none")) != "none"
    plan = Plan(
        strategy=ZERO_STAGES.get(stage, "zero2") if isinstance(stage, int) else "zero2",
        micro_batch=micro_batch or None,
        accumulate=accumulate,
        # Stages 2 and 3 reduce in every pass, since a rank keeps only its own slice.
        accumulate_reduced=accumulate > 1 and isinstance(stage, int) and stage >= 2,
        precision=precision,
        reduce_dtype=reduces_in,
        offload_states=offloads,
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
