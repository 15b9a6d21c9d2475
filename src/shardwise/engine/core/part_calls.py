"""Calls of a model's parts in code that runs backward by itself, any number of times (a GAN's training step).

The first call after a backward begins a forward of the model, so that what belongs to the root is gathered. The outputs
of every call announce the backward. Nothing is known of the order in which backward comes to the units.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from shardwise.engine.core.core import Core
from shardwise.engine.hooks.step_hooks import recomputing


class PartCalls:
    """Watches the calls of all modules of a model; only the outermost ones count."""

    def __init__(self, core: Core) -> None:
        self._core, self._hooks, self._root = core, core.hooks, core.root
        self._parts = {id(module) for module in core.model.modules()}
        self._depth = 0
        self._evaluates = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        passes = self._core.setting.passes
        handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        passes.by_parts = True
        try:
            yield
        finally:
            passes.by_parts = False
            for handle in handles:
                handle.remove()

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if recomputing() or id(module) not in self._parts:
            return
        self._depth += 1
        if self._depth == 1 and not self._core.state.is_in_step:
            self._evaluates = not torch.is_grad_enabled()
            self._hooks.begin_forward(self._root)

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if recomputing() or id(module) not in self._parts:
            return
        self._depth -= 1
        if self._depth:
            return
        if self._evaluates:
            self._evaluates = False
            self._core.without_gradients(self._root, begins=False)
        elif torch.is_grad_enabled():
            self._hooks.announce_outputs(output, self._root)
