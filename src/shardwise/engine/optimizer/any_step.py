"""Hooks on every optimizer and every scaler of this process: one that nobody handed over may step a prepared model."""

import weakref
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.engine.optimizer.owned import OwnedParameters
from shardwise.engine.optimizer.scaler import GradScaler, foreign_scaler

_PREPARED: weakref.WeakSet[OwnedParameters] = weakref.WeakSet()


def look_after(parameters: OwnedParameters) -> None:
    """From here on, as long as they live, whatever steps them is recognised."""
    _PREPARED.add(parameters)


def _recognise(optimizer: Optimizer) -> None:
    """Collective, at the first call for an optimizer of a prepared model."""
    for owner in list(_PREPARED):
        if not owner.adopted(optimizer) and owner.concerns(optimizer):
            # In a step, the hooks that it registers are called for that step already.
            owner.adopt_alike(optimizer)


_HOOK = register_optimizer_step_pre_hook(lambda optimizer, *_: _recognise(optimizer))


# torch's scaler looks at gradients here on every rank, also on one that then skips its step for an overflow.
_TORCHS_UNSCALE = torch.amp.GradScaler._unscale_grads_


@wraps(_TORCHS_UNSCALE)
def _unscale_grads(scaler: torch.amp.GradScaler, optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
    if not isinstance(scaler, GradScaler) and any(owner.in_slices(optimizer) for owner in list(_PREPARED)):
        raise foreign_scaler()
    _recognise(optimizer)
    return _TORCHS_UNSCALE(scaler, _with_slices(optimizer), *arguments, **options)


def _with_slices(optimizer: Optimizer) -> Any:
    """What a scaler looks at: an optimizer's groups; and, of what it steps whole, the gradients in slices."""
    slices = [part for owner in list(_PREPARED) for part in owner.matrices.slices(optimizer)]
    if not slices:
        return optimizer
    return SimpleNamespace(param_groups=[*optimizer.param_groups, {"params": slices}])


torch.amp.GradScaler._unscale_grads_ = _unscale_grads  # type: ignore[assignment, method-assign]
