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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardwise.engine.core.flat import FlatParams

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


def carried_tensors(parameter: nn.Parameter) -> list[tuple[str, Tensor]]:
    """(path, tensor) of what a parameter carries; not what is its own memory by another name."""
    found = [(path, value) for path, value in _carried(parameter) if isinstance(value, Tensor)]
    if not found or parameter.is_meta:
        return found
    with torch._C.DisableTorchFunctionSubclass():
        own = parameter.data_ptr()
    return [(path, tensor) for path, tensor in found if tensor.data_ptr() != own]


def is_packed(parameter: nn.Parameter) -> bool:
    """Whether its elements are no numbers of their own but bits that a state says how to read."""
    return (
        type(parameter) is not nn.Parameter
        and not is_traceable_wrapper_subclass(parameter)
        and not parameter.requires_grad
        and any(isinstance(value, Tensor) for _, value in _carried(parameter))
    )


@torch.no_grad()
def broadcast_carried(model: nn.Module, *, device: torch.device, group: ProcessGroup | None = None) -> None:
    """Rank 0's values into the tensors that every rank's parameters carry. Collective."""
    for parameter in model.parameters():
        for _, tensor in _carried(parameter):
            if isinstance(tensor, Tensor):
                value = tensor.to(device).contiguous()
                dist.broadcast(value, src=0, group=group)
                tensor.copy_(value)


def let_follow(parameter: nn.Parameter, *, module: nn.Module, place: Tensor) -> bool:
    """What is the parameter's own memory under another name moves to `place` with it, before the parameter does.

    bitsandbytes' int8 weights have it as an attribute, and from the first forward on in a state of the module's. As a
    copy of its own it would stay whole on every rank. Whether there is any.
    """
    with torch._C.DisableTorchFunctionSubclass():
        own = (parameter.data_ptr(), parameter.shape, parameter.dtype)
    if own[0] == 0:
        return False
    found = [_replace(vars(holder), own=own, place=place, depth=_DEPTH, seen=set()) for holder in (parameter, module)]
    return any(found)


def follow_carried(flat: FlatParams, index: int, parameter: nn.Parameter, module: nn.Module) -> None:
    """Note in `flat` whether a module holds on to the memory of a parameter by another name, and move that."""
    flat.followed |= let_follow(parameter, module=module, place=flat.full_views[index])


def _replace(
    attributes: dict[str, Any], *, own: tuple[int, torch.Size, torch.dtype], place: Tensor, depth: int, seen: set[int]
) -> bool:
    replaced = False
    for name, value in attributes.items():
        if isinstance(value, _PLAIN + _NOT_LOOKED_INTO) or depth == 0 or id(value) in seen:
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
