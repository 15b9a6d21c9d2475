"""Loss scaling for fp16: a step in which gradients overflow on any rank is skipped on every rank."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shardwise.base.errors import InvalidPlan


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler, with the same decision on all ranks.

    Each rank checks the slices that it owns; the results are combined before any rank steps. `scale`, `unscale_`,
    `step` and `update` are called like torch's. Collective, where torch's `unscale_` or `step` reads gradients.
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
        """Run torch's method, then combine: 1 if any rank has found an inf or a NaN."""
        found: dict[Any, Tensor] = dict(super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16))
        here = [_plain(value).to(found_inf.device) for value in found.values()]
        anywhere = torch.stack(here).amax() if here else torch.zeros_like(found_inf)
        if dist.is_initialized():
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
        # A rank that owns no gradient returns the same answer.
        devices = list(found) or [found_inf.device]
        return {device: anywhere.to(device) for device in devices}


def _plain(value: Tensor) -> Tensor:
    """Return a plain tensor: torch's `fully_shard` gives DTensors, which are reduced when they are unsharded."""
    unsharded: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return unsharded


# The scalers that are stepping an optimizer, the innermost last.
_STEPPING: list[torch.amp.GradScaler] = []


def noted_step(step: Callable[..., Any], scaler: torch.amp.GradScaler, *arguments: Any, **options: Any) -> Any:
    """Run a scaler's step, and note during it whose step it is."""
    _STEPPING.append(scaler)
    try:
        return step(scaler, *arguments, **options)
    finally:
        _STEPPING.pop()


def called_by_torchs() -> bool:
    """Return whether the current step was called by torch's scaler, and not by ours."""
    return bool(_STEPPING) and not isinstance(_STEPPING[-1], GradScaler)


def foreign_scaler() -> InvalidPlan:
    return InvalidPlan(
        "torch's GradScaler cannot see an overflow in another rank's slice: use shardwise.GradScaler, or "
        "precision = 'bf16', which needs no scaling"
    )
