"""Tensors that a parameter carries as Python attributes: the scales of a quantised weight.

bitsandbytes' Params4bit, for example, is a packed weight with a `quant_state` that unpacks it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.torch_internals.torch_private import DisableTorchFunctionSubclass, is_traceable_wrapper_subclass

# Levels of attributes that are searched: a parameter → its state → a nested state → its attributes.
_DEPTH = 4
_PLAIN = (bool, int, float, str, torch.dtype, torch.Size)
# Their state is handled elsewhere.
_NOT_SEARCHED = (nn.Module, nn.Parameter, type)


def carried(parameter: nn.Parameter) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for the tensors and plain values in a parameter's attributes, in the order they were set."""
    seen: set[int] = set()
    for name, value in vars(parameter).items():
        found = list(_inside(value, path=name, depth=_DEPTH, seen=seen))
        # Plain values count only next to a tensor: they tell how to read it.
        if any(isinstance(item, Tensor) for _, item in found):
            yield from found


def carried_tensors(parameter: nn.Parameter) -> list[tuple[str, Tensor]]:
    """Return (path, tensor) for each tensor that a parameter carries, without references to its own memory."""
    found = [(path, value) for path, value in carried(parameter) if isinstance(value, Tensor)]
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
        and any(isinstance(value, Tensor) for _, value in carried(parameter))
    )


def replace_carried(
    attributes: dict[str, Any],
    *,
    own: tuple[int, torch.Size, torch.dtype],
    place: Tensor,
    seen: set[int],
    depth: int = _DEPTH,
) -> bool:
    """Put `place` for each other reference to a parameter's memory (`own`: address, shape and dtype) in attributes.

    Returns whether there was one.
    """
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
            replaced |= replace_carried(inside, own=own, place=place, depth=depth - 1, seen=seen)
    return replaced


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
