"""Allocates optimizer state before the first update, in which running out of memory could not be undone."""

from inspect import signature

import torch
from torch.optim import Optimizer

from shardwise.engine.core.flat_buffers import unguarded
from shardwise.engine.optimizer.known import ELEMENTWISE


def allocate_states(optimizer: Optimizer) -> None:
    """Allocate the state that the first update of one of torch's own optimizers would allocate.

    Their `_init_group` allocates the state of each parameter that has a gradient; it is given gradients without memory.
    The state of SGD is its first gradient, so it cannot be allocated here.
    """
    initialise = getattr(optimizer, "_init_group", None)
    if type(optimizer) not in ELEMENTWISE or initialise is None:
        return
    # Its arguments are the group and the lists that the update would use.
    num_lists = len(signature(initialise).parameters) - 1
    # An owned matrix is guarded between updates; only its shape is read here.
    with unguarded():
        for group in optimizer.param_groups:
            without = [p for p in group["params"] if p.grad is None and p.requires_grad and not optimizer.state.get(p)]
            for parameter in without:
                parameter.grad = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
            initialise(group, *([] for _ in range(num_lists)))
            for parameter in without:
                parameter.grad = None
