"""Modules of torch.jit, whose forward is not Python: they call the modules inside them without hooks."""

from collections.abc import Mapping
from types import MethodType

import torch
from torch import nn

from shardwise.base.torch_internals.torch_private import register_load_state_dict_pre_hook

_REFUSED = (
    nn.Module.register_forward_pre_hook,
    nn.Module.register_forward_hook,
    nn.Module.register_load_state_dict_pre_hook,
    register_load_state_dict_pre_hook,
)


def is_scripted(module: nn.Module) -> bool:
    """Return whether it was made by torch.jit.script, trace or load."""
    return isinstance(module, torch.jit.ScriptModule)


def allow_hooks(model: nn.Module) -> None:
    """Give scripted modules the methods of nn.Module that register hooks.

    They refuse to register them, but they run those of a module that Python calls.
    """
    for module in filter(is_scripted, model.modules()):
        vars(module).update({method.__name__: MethodType(method, module) for method in _REFUSED})


def tensor_attributes(module: nn.Module) -> list[str]:
    """Return the names of a scripted module's attributes, which are not Python's, that hold tensors and no buffers."""
    types = module._concrete_type.get_attributes()  # type: ignore[operator, union-attr]
    return [name for name, (kind, _) in types.items() if "Tensor" in str(kind) and name not in module._buffers]


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class, of a scripted one that of the class that was compiled."""
    return str(module.original_name) if is_scripted(module) else type(module).__name__


def scripted_around(path: str, *, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the path of the outermost scripted module around the module at `path`, which calls it without hooks."""
    parts = path.split(".") if path else []
    above = (".".join(parts[:end]) for end in range(len(parts)))
    return next((outer for outer in above if is_scripted(modules[outer])), None)
