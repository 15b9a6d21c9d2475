"""Give a model of the meta device real weights. Ties are kept, and random numbers are drawn in one order.

The convention is that of torch's own modules: a module with parameters or buffers of its own has
`reset_parameters()`, which fills them. So a model is built on the meta device without memory, and
filled as a whole or module by module. In a Hugging Face model `_init_weights(module)` runs last,
and modules need no `reset_parameters()`.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from shardwise.base.errors import InvalidModel
from shardwise.base.torch_internals import torch_private
from shardwise.base.torch_internals.torch_private import DisableTorchFunctionSubclass

_HUGGING_FACE = ("transformers.modeling_utils", "PreTrainedModel")


def materialize(model: nn.Module, *, device: torch.device | str = "cpu") -> None:
    """Give every meta tensor of `model` storage on `device` and its initial values.

    A tied parameter stays one parameter (`Module.to_empty` would untie it) and is filled by the
    first module that holds it. Tensors on other devices are left as they are.
    """
    real: dict[int, Tensor] = {}
    for path, module in model.named_modules():
        materialize_module(module, path=path, device=device, real=real, initialise=initialiser(model, path))


def materialize_module(
    module: nn.Module,
    *,
    path: str,
    device: torch.device | str,
    real: dict[int, Tensor],
    initialise: Callable[[nn.Module], None] | None = None,
    given: Callable[[Tensor], bool] = lambda tensor: False,
) -> None:
    """Do the same for the tensors that one module holds itself.

    real     id of a meta tensor → its real tensor, so that ties are kept
    given    whether the caller sets a tensor's values afterwards; if all are given, none are drawn
    """
    fresh = False
    for table, name, tensor in _own_meta_tensors(module):
        if id(tensor) not in real:
            real[id(tensor)] = _empty_like(tensor, device=device)
            fresh = fresh or not given(tensor)
        table[name] = real[id(tensor)]
    if fresh:
        _reset(module, path=path, initialise=initialise)


def initialiser(model: nn.Module, path: str) -> Callable[[nn.Module], None] | None:
    """Return `_init_weights` of the innermost Hugging Face model around the module at `path`, if there is one."""
    found = None
    module: nn.Module = model
    for name in ("", *path.split(".")):
        if name:
            module = getattr(module, name)
        if any((base.__module__, base.__name__) == _HUGGING_FACE for base in type(module).__mro__):
            found = module._init_weights
    return found  # type: ignore[return-value]


def _own_meta_tensors(module: nn.Module) -> Iterator[tuple[dict[str, Tensor], str, Tensor]]:
    for table in (module._parameters, module._buffers):
        for name, tensor in list(table.items()):
            if tensor is not None and tensor.is_meta:
                yield table, name, tensor  # type: ignore[misc]


def _empty_like(tensor: Tensor, *, device: torch.device | str) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return _empty(tensor, device=device)
    with DisableTorchFunctionSubclass():
        empty = _empty(tensor.data, device=device)
        # Of the same class and with its attributes: a quantised weight carries the scales that unpack it.
        made = torch_private.make_subclass(type(tensor), empty, tensor.requires_grad)
    # The same ones, since an optimizer may hold the old parameter.
    made.__dict__ = tensor.__dict__
    return made


def _empty(tensor: Tensor, *, device: torch.device | str) -> Tensor:
    if type(tensor) is Tensor and tensor.is_contiguous():
        # torch.empty_like of a meta tensor is computed in Python, and takes ten times as long.
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_like(tensor, device=device)


def _reset(module: nn.Module, *, path: str, initialise: Callable[[nn.Module], None] | None) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()
    elif initialise is None:
        raise InvalidModel(
            f"{path or 'the model'} ({type(module).__name__}) is on the meta device and has no "
            "reset_parameters(): give it one that fills its own parameters and buffers"
        )
    else:
        with torch.no_grad():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                # `_init_weights` may leave a tensor out, which must not keep uninitialised memory.
                tensor.zero_()
    if initialise is not None:
        initialise(module)
