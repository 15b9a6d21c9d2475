"""Parameters in the engine's hands: those that stand for others, and those that a guard watches."""

from typing import Any

from torch import Tensor, nn

from shardwise.base.torch_internals import torch_private
from shardwise.base.torch_internals.torch_private import DisableTorchFunctionSubclass

# A context in which parameters that a guard watches (guards/guard.py) are handled without asking it.
unguarded: Any = DisableTorchFunctionSubclass


def parameter_like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Return what an optimizer steps in place of a parameter: of its class, and with the same attributes for ever.

    An optimizer may read them (`p.no_weight_decay`), and they may be set after `prepare`.
    """
    own_class = getattr(type(parameter), "_own_class", type(parameter))
    with unguarded():
        made: nn.Parameter = torch_private.make_subclass(own_class, values, parameter.requires_grad)
    made.__dict__ = parameter.__dict__
    return made


def set_grad(parameter: nn.Parameter, grad: Tensor) -> None:
    """Set the gradient of a parameter that may live in host memory while its gradients stay on the device.

    torch refuses such a pair, but only where the gradient is set.
    """
    if parameter.device == grad.device:
        parameter.grad = grad
        return
    # Not `parameter.data`, which is guarded (guards/written.py).
    data = torch_private.tensor_data
    there = data.__get__(parameter)
    data.__set__(parameter, grad)
    parameter.grad = grad
    data.__set__(parameter, there)
