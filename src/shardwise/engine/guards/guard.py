"""Parameters that answer a careless read with one line instead of a crash or a wrong number.

While a parameter's storage is freed, reading it would read memory that is not there; while its gradient is
sharded, `p.grad` would be a silent None; while it is gathered after an update, it is half old and half new. So a
parameter at rest has a class that notices reads, but for those that ask for its shape, dtype, device and the
like. At work it is a plain Parameter.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shardwise.errors import ShardwiseError


class ShardedParameter(ShardwiseError):  # noqa: N818
    """A parameter or gradient was read that this rank holds only a slice of."""


# By the names that torch gives to the functions and property getters that it hands to __torch_function__.
_ABOUT_THE_PARAMETER = frozenset(
    {
        "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "is_meta", "is_cuda", "is_cpu",
        "is_sparse", "is_quantized", "is_nested", "is_complex", "is_floating_point", "is_contiguous", "retains_grad",
        "grad_fn", "output_nr", "names", "name", "_version", "_backward_hooks", "_post_accumulate_grad_hooks",
        "dim", "size", "numel", "nelement", "element_size", "stride", "storage_offset", "__len__", "__hash__",
        "itemsize", "nbytes", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "get_device",
        "is_signed", "is_inference", "is_conj", "is_neg", "is_mkldnn", "is_xla", "is_shared", "__reduce_ex__",
    }
)  # fmt: skip


class Resting(nn.Parameter):
    """A parameter at rest. `_touched(is_grad=…)` is called before it is read: it refuses, or makes it readable."""

    _touched: Callable[[bool], None]
    _drop_grad: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        name = _name(function)
        if name not in _ABOUT_THE_PARAMETER:
            for parameter in _resting((*arguments, *(options or {}).values())):
                if name == "grad" and len(arguments) == 2 and arguments[1] is None:
                    parameter._drop_grad()
                else:
                    parameter._touched(name == "grad")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*arguments, **(options or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Resting({tuple(self.shape)}, {self.dtype})"


def _resting(arguments: Iterable[Any]) -> Iterator[Resting]:
    """The parameters at rest among a function's arguments, also in lists, as torch.stack and foreach take them."""
    for argument in arguments:
        if isinstance(argument, Resting):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _resting(argument)


def _name(function: Any) -> str:
    """`shape` for the getter of Tensor.shape, `add` for Tensor.add."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):
        return str(getattr(function.__self__, "__name__", ""))
    return str(name)


def refuse(name: str, *, is_grad: bool) -> None:
    """The answer to a read of what this rank holds only a slice of."""
    if is_grad:
        raise ShardedParameter(
            f"the gradient of {name} is sharded: call shardwise.clip_grad_norm_, clip_grad_value_ or grad_norms with "
            "the model; this rank's slices are in optimizer.param_groups"
        )
    raise ShardedParameter(
        f"{name} is sharded and freed: for its values call shardwise.full_state_dict(model), or read it inside `with "
        "shardwise.whole(model):`, on every rank; this rank's slices are in optimizer.param_groups"
    )


def runs_forward_of(module: nn.Module) -> bool:
    """Whether whoever reads a parameter does so in this module's forward."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "forward" and frame.f_locals.get("self") is module:
            return True
    return False


def rest(parameters: Iterable[nn.Parameter]) -> None:
    """From now on a read is noticed."""
    for parameter in parameters:
        parameter.__class__ = Resting


def wake(parameters: Iterable[nn.Parameter]) -> None:
    """From now on these are ordinary parameters."""
    for parameter in parameters:
        parameter.__class__ = nn.Parameter
