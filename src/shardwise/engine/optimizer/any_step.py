"""Finds the optimizers, scalers and clippings of a prepared model's slices among all those of this process.

While a prepared model is alive, every optimizer's step, torch's GradScaler and torch's clipping of norms are observed.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.base.errors import InvalidModel
from shardwise.base.torch_internals.torch_private import disable_dynamo, place
from shardwise.base.vocabulary.while_alive import WhileAlive, hooked, replaced
from shardwise.engine.core.step_errors import updated_in_backward
from shardwise.engine.optimizer.owned import OwnedParameters
from shardwise.engine.optimizer.scaler import GradScaler, foreign_scaler, noted_step


def watch_optimizers(parameters: OwnedParameters) -> None:
    """Adopt any optimizer that steps these parameters, for as long as they exist."""
    _PREPARED.add(parameters)


@disable_dynamo
def _recognise(optimizer: Optimizer, *_: Any) -> None:
    """Adopt an optimizer of a prepared model at its first call. Collective then."""
    for owner in _PREPARED:
        if not owner.adopted(optimizer) and owner.concerns(optimizer):
            # The hooks that it registers are already called for the current step.
            owner.adopt_on_all_ranks(optimizer)


def _unscale_grads(
    unscale: Callable[..., Any], scaler: torch.amp.GradScaler, optimizer: Optimizer, *arguments: Any, **options: Any
) -> Any:
    """Recognise the optimizer where torch's scaler reads gradients.

    Every rank does so, also one that then skips its step because of an overflow.
    """
    if not isinstance(scaler, GradScaler) and any(owner.in_slices(optimizer) for owner in _PREPARED):
        raise foreign_scaler()
    if any(owner.core.followed.plan.updates_in_backward and owner.adopted(optimizer) for owner in _PREPARED):
        raise updated_in_backward("a GradScaler")
    _recognise(optimizer)
    return unscale(scaler, _with_slices(optimizer), *arguments, **options)


def _with_slices(optimizer: Optimizer) -> Any:
    """Return the optimizer for a scaler; if it has owned matrices, with their slices, which hold the gradients."""
    slices = [part for owner in _PREPARED for part in owner.matrices.slices(optimizer)]
    if not slices:
        return optimizer
    return SimpleNamespace(param_groups=[*optimizer.param_groups, {"params": slices}])


def _clip_grads(clip: Callable[..., Any], parameters: Any, *arguments: Any, **options: Any) -> Any:
    """Refuse slices where torch's clip_grad_norm_ has their norm, which is that of one rank's part."""
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if any(not owner.parts().isdisjoint(map(id, given)) for owner in _PREPARED):
        raise InvalidModel(
            "torch's clip_grad_norm_ of slices in optimizer.param_groups: each rank would clip by the norm of its own "
            "part; call shardwise.clip_grad_norm_(model, max_norm), with parameters=… for some of the model's"
        )
    return clip(given, *arguments, **options)


_PREPARED: WhileAlive[OwnedParameters] = WhileAlive(
    hooked(register_optimizer_step_pre_hook, _recognise),
    replaced(*place("clip_grads_with_norm"), _clip_grads),
    replaced(*place("unscale_grads"), _unscale_grads),
    replaced(torch.amp.GradScaler, "step", noted_step),
)
