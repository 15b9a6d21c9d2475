"""Splits frozen parameters that are tensor subclasses, such as torchao's quantised weights, into plain tensors.

A flat buffer holds plain elements. So the inner tensors become frozen parameters, which are sharded, gathered and freed
like any other, and torch's parametrization rebuilds the subclass from them whenever the module reads its weight. They
are stored as bytes, so that the plan's precision does not change them.

Without it such a weight is refused (refuse.py): it has no elements of its own to put into a buffer. Since 5dc4fae2
(quantised bases).
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from shardwise.base.torch_internals.torch_private import is_traceable_wrapper_subclass

Rebuild = Callable[[Iterator[Tensor]], Tensor]


def take_apart(model: nn.Module) -> bool:
    """Make each tensor subclass among the model's parameters a parametrization of plain ones; return if any was."""
    found = False
    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and is_traceable_wrapper_subclass(parameter):
                parametrize.register_parametrization(module, name, _PutTogether())
                found = True
    return found


class _PutTogether(nn.Module):
    """Rebuilds the subclass from plain tensors, and splits it."""

    def __init__(self) -> None:
        super().__init__()
        self._rebuild: Rebuild | None = None

    def forward(self, *parts: Tensor) -> Tensor:
        assert self._rebuild is not None
        return self._rebuild(iter(parts))

    @torch.no_grad()
    def right_inverse(self, tensor: Tensor) -> Sequence[Tensor]:
        parts, self._rebuild = _taken_apart(tensor)
        return parts


def _taken_apart(tensor: Tensor) -> tuple[list[Tensor], Rebuild]:
    """Return the plain tensors inside, at any depth, and the function that rebuilds the subclass from such tensors."""
    if not is_traceable_wrapper_subclass(tensor):
        dtype, shape = tensor.dtype, tensor.shape
        as_bytes = tensor.detach().contiguous().view(-1).view(torch.uint8)
        return [as_bytes], lambda parts: next(parts).view(dtype).view(shape)
    names, context = tensor.__tensor_flatten__()
    inside = [_taken_apart(getattr(tensor, name)) for name in names]
    kind, size, stride = type(tensor), tensor.size(), tensor.stride()

    def rebuild(parts: Iterator[Tensor]) -> Tensor:
        inner = {name: make(parts) for name, (_, make) in zip(names, inside, strict=True)}
        made: Tensor = kind.__tensor_unflatten__(inner, context, size, stride)
        return made

    return [part for parts, _ in inside for part in parts], rebuild
