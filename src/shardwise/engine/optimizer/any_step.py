"""Hooks on all optimizers, scalers and clippings of this process, to find those of a prepared model's slices."""

import weakref
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.engine.core.step_errors import updated_in_backward
from shardwise.engine.optimizer.owned import OwnedParameters
from shardwise.engine.optimizer.scaler import GradScaler, foreign_scaler
from shardwise.errors import InvalidModel

_PREPARED: weakref.WeakSet[OwnedParameters] = weakref.WeakSet()


def watch_optimizers(parameters: OwnedParameters) -> None:
    """Adopt any optimizer that steps these parameters, for as long as they exist."""
    _PREPARED.add(parameters)


@_disable_dynamo
def _recognise(optimizer: Optimizer) -> None:
    """Adopt an optimizer of a prepared model at its first call. Collective then."""
    for owner in list(_PREPARED):
        if not owner.adopted(optimizer) and owner.concerns(optimizer):
            # The hooks that it registers are already called for the current step.
            owner.adopt_on_all_ranks(optimizer)


_HOOK = register_optimizer_step_pre_hook(lambda optimizer, *_: _recognise(optimizer))


# torch's scaler reads gradients here on every rank, also on one that then skips its step because of an overflow.
_TORCHS_UNSCALE = torch.amp.GradScaler._unscale_grads_


@wraps(_TORCHS_UNSCALE)
def _unscale_grads(scaler: torch.amp.GradScaler, optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
    if not isinstance(scaler, GradScaler) and any(owner.in_slices(optimizer) for owner in list(_PREPARED)):
        raise foreign_scaler()
    if any(owner.core.plan.updates_in_backward and owner.adopted(optimizer) for owner in list(_PREPARED)):
        raise updated_in_backward("a GradScaler")
    _recognise(optimizer)
    return _TORCHS_UNSCALE(scaler, _with_slices(optimizer), *arguments, **options)


def _with_slices(optimizer: Optimizer) -> Any:
    """Return the optimizer for a scaler; if it has owned matrices, with their slices, which hold the gradients."""
    slices = [part for owner in list(_PREPARED) for part in owner.matrices.slices(optimizer)]
    if not slices:
        return optimizer
    return SimpleNamespace(param_groups=[*optimizer.param_groups, {"params": slices}])


# torch's clip_grad_norm_ calls this once it has a norm: on slices that would be the norm of one rank's part.
_TORCHS_CLIPPING = torch.nn.utils.clip_grad._clip_grads_with_norm_


@wraps(_TORCHS_CLIPPING)
def _clip_grads(parameters: Any, *arguments: Any, **options: Any) -> Any:
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if any(not owner.parts().isdisjoint(map(id, given)) for owner in list(_PREPARED)):
        raise InvalidModel(
            "torch's clip_grad_norm_ of slices in optimizer.param_groups: each rank would clip by the norm of its own "
            "part; call shardwise.clip_grad_norm_(model, max_norm), with parameters=… for some of the model's"
        )
    return _TORCHS_CLIPPING(given, *arguments, **options)


torch.nn.utils.clip_grad._clip_grads_with_norm_ = _clip_grads
torch.amp.GradScaler._unscale_grads_ = _unscale_grads  # type: ignore[assignment, method-assign]
