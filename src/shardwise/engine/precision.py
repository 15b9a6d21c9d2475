"""Which dtype computes, which one is stepped, and which one sums."""

import torch

from shardwise.plan import Plan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(plan: Plan, own: torch.dtype) -> torch.dtype:
    """What a parameter of dtype `own` computes in; what is not floating point stays as it is."""
    if plan.precision == "native" or not own.is_floating_point:
        return own
    return DTYPES[plan.precision]


def master_dtype(plan: Plan, own: torch.dtype) -> torch.dtype:
    """What the optimizer steps."""
    if plan.precision == "native" or not own.is_floating_point:
        return own
    return torch.float32


def input_dtype(plan: Plan) -> torch.dtype | None:
    """What the model's inputs are cast to; None leaves them alone."""
    return None if plan.precision == "native" else DTYPES[plan.precision]


def reduce_dtype(plan: Plan) -> torch.dtype:
    return DTYPES[plan.reduce_dtype]
