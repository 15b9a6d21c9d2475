"""fp16: gradients that would vanish are scaled up, and a step in which they overflow is skipped, on every rank."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import InvalidPlan


class GradScaler(torch.amp.GradScaler):
    """torch's own, whose decision is the same on all ranks.

    Each rank looks at the slices that it owns, so a bad value that lies in one rank's slice is news to the others: what
    each found is put together before anybody steps. `scale`, `unscale_`, `step` and `update` are called as torch's.
    Collective, where torch's `unscale_` or `step` looks at gradients.
    """

    def __init__(
        self,
        device: str | None = None,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(chosen, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """torch's, then all ranks': 1 wherever any of them found an inf or a NaN."""
        found: dict[Any, Tensor] = dict(super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16))
        here = [_plain(value).to(found_inf.device) for value in found.values()]
        anywhere = torch.stack(here).amax() if here else torch.zeros_like(found_inf)
        if dist.is_initialized():
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        # A rank that owns no gradient has the same answer to give.
        devices = list(found) or [found_inf.device]
        return {device: anywhere.to(device) for device in devices}


def _plain(value: Tensor) -> Tensor:
    """torch's `fully_shard` finds in DTensors, which add up by themselves when they are made whole."""
    whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole


def called_by_torchs() -> bool:
    """Whether the step that is going on was called by torch's own scaler, and not by ours."""
    frame = sys._getframe(1)
    for _ in range(12):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            return not isinstance(frame.f_locals.get("self"), GradScaler)
    return False


def foreign_scaler() -> InvalidPlan:
    return InvalidPlan(
        "torch's GradScaler cannot see an overflow in another rank's slice: use shardwise.GradScaler, or "
        "precision = 'bf16', which needs no scaling"
    )
