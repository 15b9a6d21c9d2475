"""Optimizer state before the first step: torch's optimizers allocate it in their first update, where nothing helps."""

from inspect import signature

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.engine.core.flat_buffers import unguarded
from shardwise.engine.optimizer.known import ELEMENTWISE


def allocate_states(optimizer: Optimizer) -> None:
    """Make the state that the first update would find missing; of torch's own optimizers, which say how.

    Their `_init_group` makes the state of each parameter that has a gradient, as a step begins; it is shown a gradient
    without memory. What SGD keeps is its first gradient, which it cannot make.
    """
    initialise = getattr(optimizer, "_init_group", None)
    if type(optimizer) not in ELEMENTWISE or initialise is None:
        return
    # The group, and lists for what the update will use.
    num_lists = len(signature(initialise).parameters) - 1
    # A matrix that a rank owns is at rest between updates, and has its shape, which is all that is asked of it.
    with unguarded():
        for group in optimizer.param_groups:
            without = [p for p in group["params"] if p.grad is None and p.requires_grad and not optimizer.state.get(p)]
            for parameter in without:
                parameter.grad = _no_gradient(parameter)
            initialise(group, *([] for _ in range(num_lists)))
            for parameter in without:
                parameter.grad = None


def _no_gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
