"""Forwards of modules inside a model without gradients, where the model's own forward does not run.

`generate` calls an encoder-decoder's encoder, a LoRA wrapper's `generate` calls the model inside of it, and `encode` of
sentence-transformers calls one module after the other. Units have hooks of their own. The rest of the model is one
unit too, the root: it is gathered for the outermost of these calls.

Without it these calls end in the error for a freed parameter (guard.py). Since dd431d9d (evaluation by one rank alone).
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.base.torch_internals.torch_private import disable_dynamo
from shardwise.engine.core.core import Core
from shardwise.engine.hooks.step_hooks import recomputing
from shardwise.program.spec import ROOT
from shardwise.program.units import called_modules

# Read by transformers' `generate`, and by dynamo if the first is true (prepared/prepared_module.py).
_READ_BY_OTHERS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


class InnerCalls:
    """Gathers the root for calls of modules inside of it."""

    def __init__(self, core: Core) -> None:
        self._core, self._root = core, core.units[ROOT]
        # The outermost module that is called now.
        self._outermost: nn.Module | None = None

    def attach(self) -> list[Any]:
        """Register hooks on the modules that use parameters of the root. Returns their handles."""
        handles: list[Any] = []
        if not self._core.followed.any_sharded:
            return handles
        for module in self._core.model.modules():
            if module is not self._core.model and callable(getattr(module, "generate", None)):
                handles.append(_Generates(module, core=self._core))
        for module in self._modules() if self._root.sharded else ():
            handles.append(module.register_forward_pre_hook(partial(_begin, self), prepend=True))
            handles.append(module.register_forward_hook(partial(_end, self), always_call=True))
        return handles

    def _modules(self) -> Iterator[nn.Module]:
        """Yield the modules outside of units that have parameters of the root, without those with the root's hooks."""
        of_units = {id(unit.module) for unit in self._core.units.values() if unit is not self._root}
        hooked = {id(module) for module in called_modules(self._root.module)}
        own = {id(parameter) for parameter in self._root.params()}
        waiting, seen = [self._root.module], set()
        while waiting:
            module = waiting.pop()
            if id(module) in of_units or id(module) in seen:
                continue
            seen.add(id(module))
            waiting += module.children()
            if id(module) not in hooked and any(id(parameter) in own for parameter in module.parameters()):
                yield module

    def begin(self, module: nn.Module) -> None:
        """Gather the root, unless it is there: the model's own forward runs, or a call around this one."""
        if not self._root.whole:
            self._core.without_gradients(self._root, begins=True)
            # Only a part of the model is called.
            self._core.evaluation.leave_order()
            self._outermost = module

    def end(self, module: nn.Module) -> None:
        if module is self._outermost:
            self._outermost = None
            self._core.without_gradients(self._root, begins=False)


class _Generates:
    """Tells transformers' `generate` of a model inside the prepared one: a rank continues until all have finished.

    It takes the place of an attribute that is true or false, since that changes (PreparedModule), and ends like a hook.
    """

    def __init__(self, module: nn.Module, *, core: Core) -> None:
        self.id = -1
        self._module, self._core = module, core
        module.__dict__.update(dict.fromkeys(_READ_BY_OTHERS, self))

    def __bool__(self) -> bool:
        return self._core.followed.generates_together

    def remove(self) -> None:
        for name in _READ_BY_OTHERS:
            self._module.__dict__.pop(name, None)


@disable_dynamo
def _begin(calls: InnerCalls, module: nn.Module, inputs: Any) -> None:
    if not torch.is_grad_enabled() and not recomputing():
        calls.begin(module)


@disable_dynamo
def _end(calls: InnerCalls, module: nn.Module, inputs: Any, output: Any) -> None:
    calls.end(module)
