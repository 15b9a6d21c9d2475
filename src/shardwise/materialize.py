"""A model built on the meta device becomes real, with its ties kept and one order of random numbers.

The convention is the one that torch's own modules follow: a module that holds parameters or
buffers of its own has `reset_parameters()`, which fills them. So a model can be described for
nothing, and then be filled whole or module by module.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardwise.errors import InvalidModel


def materialize(model: nn.Module, *, device: torch.device | str = "cpu") -> None:
    """Give every meta tensor of `model` storage on `device` and its initial values.

    A tied parameter stays one parameter (`Module.to_empty` would untie it) and is filled by the
    first module that holds it. What is not on the meta device is left as it is.
    """
    real: dict[int, Tensor] = {}
    for path, module in model.named_modules():
        materialize_module(module, path=path, device=device, real=real)


def materialize_module(module: nn.Module, *, path: str, device: torch.device | str, real: dict[int, Tensor]) -> None:
    """The same for what one module holds itself. `real` remembers, by the meta tensor's id, what ties need."""
    fresh = False
    for table, name, tensor in _own_meta_tensors(module):
        if id(tensor) not in real:
            real[id(tensor)] = _empty_like(tensor, device=device)
            fresh = True
        table[name] = real[id(tensor)]
    if fresh:
        _reset(module, path=path)


def _own_meta_tensors(module: nn.Module) -> Iterator[tuple[dict[str, Tensor], str, Tensor]]:
    for table in (module._parameters, module._buffers):
        for name, tensor in list(table.items()):
            if tensor is not None and tensor.is_meta:
                yield table, name, tensor  # type: ignore[misc]


def _empty_like(tensor: Tensor, *, device: torch.device | str) -> Tensor:
    empty = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _reset(module: nn.Module, *, path: str) -> None:
    reset = getattr(module, "reset_parameters", None)
    if not callable(reset):
        raise InvalidModel(
            f"{path or 'the model'} ({type(module).__name__}) is on the meta device and has no "
            "reset_parameters(): give it one that fills its own parameters and buffers"
        )
    reset()
