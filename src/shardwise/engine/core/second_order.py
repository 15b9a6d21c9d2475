"""Gradients of gradients: a backward with create_graph=True, whose gradients a later backward goes through."""

from collections.abc import Iterable

import torch
from torch import nn

from shardwise.base.torch_internals import torch_private
from shardwise.engine.core import step_errors
from shardwise.engine.core.unit import Unit


def leave_to_autograd(units: Iterable[Unit]) -> None:
    """Let such a backward run without the engine: it reduces nothing. Refuse it where parameters do not stay.

    The later backward is the step's. It may begin at any parameter, not at the model's outputs.
    """
    for unit in units:
        if unit.sharded:
            raise step_errors.gradients_of_gradients(unit.name)
        if any(map(_accumulates, unit.settled)):
            raise step_errors.graph_in_grads()
        unit.grads.begin_with_any(unit.settled)


def _accumulates(parameter: nn.Parameter) -> bool:
    """Return whether the backward that runs adds to the parameter's gradient; torch.autograd.grad does not."""
    if not parameter.requires_grad:
        return False
    try:
        return torch_private.will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node)
    except RuntimeError:
        # torch's answer for a parameter whose gradient torch.autograd.grad returns.
        return False
