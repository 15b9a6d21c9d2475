"""What must be equal for passes to have the same graphs, and when calls of units are ordinary."""

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwise.base.torch_internals import torch_private
from shardwise.engine.hooks.step_hooks import recomputing, transforming

# Flags; a number may be that of the step.
_FLAGS = (bool, str, type(None))


def shapes_of(value: Any) -> Iterator[Any]:
    """Yield the shapes of the tensors in a model's inputs, and their dtypes; flags; other objects by their type."""
    if isinstance(value, Tensor):
        yield (value.shape, value.dtype)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from shapes_of(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from shapes_of(item)
    else:
        yield value if isinstance(value, _FLAGS) else type(value)


def num_elements(inputs: Iterable[Any]) -> int:
    """Return the number of elements of a pass's inputs, of which these are the shapes."""
    return sum(prod(entry[0]) for entry in inputs if isinstance(entry, tuple))


def is_special(device: torch.device) -> bool:
    """Return whether this call is none of the program's: recomputed, transformed, or inside another capture."""
    if recomputing() or transforming():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def why_untraceable() -> str:
    """Return why nothing can be traced now, or the trace would not be what runs; "" if it can."""
    modes = torch_private.function_modes()
    if not all(isinstance(mode, torch_private.DeviceContext) for mode in modes):
        return "a TorchFunctionMode is active"
    if torch_private.num_dispatch_modes():
        return "a TorchDispatchMode is active"
    if torch_private.has_global_hooks():
        return "hooks are registered for all modules (register_module_forward_hook and the like)"
    return ""
