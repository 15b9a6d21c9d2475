"""Tensors that a parameter carries as Python attributes: the scales of a quantised weight.

bitsandbytes' Params4bit, for example, is a packed weight with a `quant_state` that unpacks it. It is no parameter or
buffer, but it belongs to the weight: when the weight comes from rank 0, it must too.

Without it a rank would unpack rank 0's weights by its own scales: other numbers, and no error. Since f1542458
(quantised weights).
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.base.torch_internals.torch_private import DisableTorchFunctionSubclass
from shardwise.engine.core.flat import FlatParams
from shardwise.program.units.carried_tensors import carried, replace_carried


def describe_carried(model: nn.Module) -> list[str]:
    """Return one line for each tensor that a parameter carries, and for each plain value next to it."""
    return [
        f"{name}.{path} {list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else f"{name}.{path} = {value}"
        for name, parameter in model.named_parameters()
        for path, value in carried(parameter)
    ]


@torch.no_grad()
def broadcast_carried(model: nn.Module, *, device: torch.device, group: ProcessGroup | None = None) -> None:
    """Copy rank 0's values into the tensors that every rank's parameters carry. Collective."""
    for parameter in model.parameters():
        for _, tensor in carried(parameter):
            if isinstance(tensor, Tensor):
                value = tensor.to(device).contiguous()
                dist.broadcast(value, src=0, group=group)
                tensor.copy_(value)


def follow_carried(flat: FlatParams, index: int, parameter: nn.Parameter, module: nn.Module) -> None:
    """Point other references to the parameter's memory to its place in `flat`, before the parameter itself moves.

    bitsandbytes' int8 weights have one as an attribute, and after the first forward in a state of the module. It would
    keep an unsharded copy alive on every rank. The buffer is told if there is any.
    """
    with DisableTorchFunctionSubclass():
        own = (parameter.data_ptr(), parameter.shape, parameter.dtype)
    if own[0] != 0:
        place = flat.full.views[index]
        for holder in (parameter, module):
            if replace_carried(vars(holder), own=own, place=place, seen=set()):
                flat.full.follow()
