"""A loss with parameters of its own (a classifier on top of embeddings): the model holds them while it is trained.

One optimizer steps them with the model's, so that one engine has to have them all. They belong to the root, which stays
gathered from forward to the end of backward: the loss may use them in between. State dicts do not contain them.
"""

from typing import Any

from torch import Tensor, nn

from shardwise.engines import require_engine

_NAME = "loss_parameters"
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class LossParameters(nn.Module):
    """Parameters that are trained with a model, and are not part of its state."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        for number, parameter in enumerate(parameters):
            self.register_parameter(str(number), parameter)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Add nothing."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """Expect nothing."""


def hold_loss_parameters(model: nn.Module, losses: Any) -> None:
    """Give the parameters that losses (a module, or several by name) have in addition to the model's to the model."""
    modules = [
        loss for loss in (losses.values() if isinstance(losses, dict) else [losses]) if isinstance(loss, nn.Module)
    ]
    own = {id(parameter) for parameter in model.parameters()}
    extra = [p for loss in modules for p in loss.parameters() if id(p) not in own]
    if extra:
        _holder(model).add_module(_NAME, LossParameters(list(dict.fromkeys(extra))))


def announce_loss(model: nn.Module, loss: Tensor) -> None:
    """Before its backward: let it begin at the loss, if the model holds parameters of the loss."""
    if _NAME in _holder(model)._modules:
        require_engine(model).announce_loss(loss)


def without_loss_parameters(model: nn.Module) -> list[Tensor]:
    """Return the parameters of the model itself."""
    held = _holder(model)._modules.get(_NAME)
    extra = {id(parameter) for parameter in held.parameters()} if held is not None else set()
    return [parameter for parameter in model.parameters() if id(parameter) not in extra]


def _holder(model: nn.Module) -> nn.Module:
    """Return the module that holds the parameters of a loss: no container, which calls all that it holds."""
    return next((module for module in model.modules() if not isinstance(module, _CONTAINERS)), model)
