"""Tensors that a parameter carries as Python attributes: the scales of a quantised weight.

bitsandbytes' Params4bit, say, is a packed weight with a `quant_state` that unpacks it. No list of parameters or
buffers has it, but it belongs to the weight: where the weight comes from rank 0, so must this.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

# How deep attributes are looked into: a parameter → its state → a nested state → what is in that.
_DEPTH = 4
_PLAIN = (bool, int, float, str, torch.dtype, torch.Size)
# They have states of their own, or none.
_NOT_LOOKED_INTO = (nn.Module, nn.Parameter, type)


def describe_carried(model: nn.Module) -> list[str]:
    """A line for each tensor that a parameter carries, and for the plain values with it."""
    return [
        f"{name}.{path} {list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else f"{name}.{path} = {value}"
        for name, parameter in model.named_parameters()
        for path, value in _carried(parameter)
    ]


@torch.no_grad()
def broadcast_carried(model: nn.Module, *, device: torch.device, group: ProcessGroup | None = None) -> None:
    """Rank 0's values into the tensors that every rank's parameters carry. Collective."""
    for parameter in model.parameters():
        for _, tensor in _carried(parameter):
            if isinstance(tensor, Tensor):
                value = tensor.to(device).contiguous()
                dist.broadcast(value, src=0, group=group)
                tensor.copy_(value)


def _carried(parameter: nn.Parameter) -> Iterator[tuple[str, Any]]:
    """(path, value) of what the attributes of a parameter hold, in the order in which they were set."""
    seen: set[int] = set()
    for name, value in vars(parameter).items():
        found = list(_inside(value, path=name, depth=_DEPTH, seen=seen))
        # A plain value counts where it says how to read a tensor.
        if any(isinstance(item, Tensor) for _, item in found):
            yield from found


def _inside(value: Any, *, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _PLAIN):
        yield path, value
        return
    if depth == 0 or id(value) in seen or isinstance(value, _NOT_LOOKED_INTO):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if not value.is_meta:
            yield path, value
        return
    if isinstance(value, dict):
        parts = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(str(index), item) for index, item in enumerate(value)]
    else:
        parts = list(getattr(value, "__dict__", {}).items())
    for name, item in parts:
        yield from _inside(item, path=f"{path}.{name}", depth=depth - 1, seen=seen)
