"""Tensors that a parameter carries as Python attributes: the scales of a quantised weight.

bitsandbytes' Params4bit, for example, is a packed weight with a `quant_state` that unpacks it. It is no parameter or
buffer, but it belongs to the weight: when the weight comes from rank 0, it must too.

Without it a rank would unpack rank 0's weights by its own scales: other numbers, and no error. Since f1542458
(quantised weights).
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise.engine.core.flat import FlatParams
from shardwise.torch_internals.torch_private import DisableTorchFunctionSubclass, is_traceable_wrapper_subclass

# Levels of attributes that are searched: a parameter → its state → a nested state → its attributes.
_DEPTH = 4
_PLAIN = (bool, int, float, str, torch.dtype, torch.Size)
# Their state is handled elsewhere.
_NOT_SEARCHED = (nn.Module, nn.Parameter, type)


def describe_carried(model: nn.Module) -> list[str]:
    """Return one line for each tensor that a parameter carries, and for each plain value next to it."""
    return [
        f"{name}.{path} {list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else f"{name}.{path} = {value}"
        for name, parameter in model.named_parameters()
        for path, value in _carried(parameter)
    ]


def carried_tensors(parameter: nn.Parameter) -> list[tuple[str, Tensor]]:
    """Return (path, tensor) for each tensor that a parameter carries, without references to its own memory."""
    found = [(path, value) for path, value in _carried(parameter) if isinstance(value, Tensor)]
    if not found or parameter.is_meta:
        return found
    with DisableTorchFunctionSubclass():
        own = parameter.data_ptr()
    return [(path, tensor) for path, tensor in found if tensor.data_ptr() != own]


def is_packed(parameter: nn.Parameter) -> bool:
    """Return whether its elements are packed bits that need a carried state to be read."""
    return (
        type(parameter) is not nn.Parameter
        and not is_traceable_wrapper_subclass(parameter)
        and not parameter.requires_grad
        and any(isinstance(value, Tensor) for _, value in _carried(parameter))
    )


@torch.no_grad()
def broadcast_carried(model: nn.Module, *, device: torch.device, group: ProcessGroup | None = None) -> None:
    """Copy rank 0's values into the tensors that every rank's parameters carry. Collective."""
    for parameter in model.parameters():
        for _, tensor in _carried(parameter):
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
            if _replace(vars(holder), own=own, place=place, depth=_DEPTH, seen=set()):
                flat.full.follow()


def _replace(
    attributes: dict[str, Any], *, own: tuple[int, torch.Size, torch.dtype], place: Tensor, depth: int, seen: set[int]
) -> bool:
    replaced = False
    for name, value in attributes.items():
        if isinstance(value, _PLAIN + _NOT_SEARCHED) or depth == 0 or id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) is Tensor:
            if (value.data_ptr(), value.shape, value.dtype) == own:
                attributes[name] = place
                replaced = True
        elif not isinstance(value, Tensor):
            inside = getattr(value, "__dict__", {})
            replaced |= _replace(inside, own=own, place=place, depth=depth - 1, seen=seen)
    return replaced


def _carried(parameter: nn.Parameter) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for the tensors and plain values in a parameter's attributes, in the order they were set."""
    seen: set[int] = set()
    for name, value in vars(parameter).items():
        found = list(_inside(value, path=name, depth=_DEPTH, seen=seen))
        # Plain values count only next to a tensor: they tell how to read it.
        if any(isinstance(item, Tensor) for _, item in found):
            yield from found


def _inside(value: Any, *, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _PLAIN):
        yield path, value
        return
    if depth == 0 or id(value) in seen or isinstance(value, _NOT_SEARCHED):
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
