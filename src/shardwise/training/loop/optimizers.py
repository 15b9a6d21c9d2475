"""[optimizer] → a torch optimizer."""

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.errors import InvalidModel
from shardwise.models.muon import MuonWithAdamW, split_off_matrices
from shardwise.training.config.config_sections import OptimizerSection

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}


def make_optimizer(model: nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    """Return an optimizer of the trained parameters; biases and norms do not decay unless the section says so."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise InvalidModel(f"{type(model).__name__} has no parameter that is trained")
    options = section.options()
    if section.name != "muon":
        groups = _groups(trained, section)
        return _CLASSES[section.name](groups, lr=section.lr, **options)  # type: ignore[call-arg]
    matrices, others = split_off_matrices(model)
    muon, adamw = (
        {name: value for name, value in options.items() if name in names}
        for names in (("weight_decay", "momentum", "nesterov", "ns_steps"), ("weight_decay", "betas", "eps", "fused"))
    )
    return MuonWithAdamW(matrices, _groups(others, section), lr=section.lr, muon=muon, adamw=adamw)


def _groups(trained: list[nn.Parameter], section: OptimizerSection) -> list[dict[str, Any]]:
    """Return parameter groups, by whether they decay."""
    groups: list[dict[str, Any]] = [{"params": trained}]
    if not section.decay_vectors:
        groups = [
            {"params": [parameter for parameter in trained if parameter.dim() >= 2]},
            {"params": [parameter for parameter in trained if parameter.dim() < 2], "weight_decay": 0.0},
        ]
    return [group for group in groups if group["params"]]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            # Kernels read the rate from this tensor.
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
