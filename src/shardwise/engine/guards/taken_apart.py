"""Frozen parameters that are tensor subclasses, such as torchao's quantised weights, as the plain tensors inside them.

A flat buffer holds plain elements. So the tensors inside become frozen parameters, which are sharded, gathered and
freed like any other, and the subclass is put together again around them whenever the module reads its weight: torch's
own parametrization does that. They are kept as bytes, so that no precision of the plan changes them.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Rebuild = Callable[[Iterator[Tensor]], Tensor]


def take_apart(model: nn.Module) -> None:
    """Each tensor subclass among the model's parameters as a parametrization of plain ones."""
    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and is_traceable_wrapper_subclass(parameter):
                parametrize.register_parametrization(module, name, _PutTogether())


class _PutTogether(nn.Module):
    """From the plain tensors to the subclass, and back."""

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
    """The plain tensors inside, at any depth, and what makes the same of others like them."""
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
