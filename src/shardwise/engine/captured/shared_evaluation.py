"""Evaluations in the memory of the steps: any forward of the model under no_grad.

It runs on the stream of the steps, because no other stream can use the free blocks of that one.
"""

import threading
import weakref
from typing import Any

import torch
from torch import nn

from shardwise.engine.captured.step_memory import EVALUATIONS, StepMemory
from shardwise.engine.graphs.step_device import StepDevice


class SharedEvaluation:
    """Listens to a model's forward, outside of steps, in the thread that trains."""

    def __init__(self, model: nn.Module, *, memory: StepMemory, device: StepDevice) -> None:
        self._memory = memory
        self._device = device
        self._thread = threading.get_ident()
        # The stream on which the evaluation was called (None outside of one), and the depth of nested forwards.
        self._caller: Any = None
        self._depth = 0
        model.register_forward_pre_hook(_Hook(self, "begin"), prepend=True)
        model.register_forward_hook(_Hook(self, "end"), always_call=True)

    def begin(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled() or threading.get_ident() != self._thread:
            return
        if self._caller is not None:
            self._depth += 1
        elif self._memory.enter(EVALUATIONS):
            self._caller = self._device.enter_stream()

    def end(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if self._caller is None or threading.get_ident() != self._thread:
            return None
        if self._depth:
            self._depth -= 1
            return None
        self.leave()
        return self._memory.copied_out(output, user=EVALUATIONS)

    def leave(self) -> None:
        """Return to the caller's stream and memory. A forward that was interrupted has not done so."""
        if self._caller is not None:
            self._memory.pool.end()
            self._device.leave_stream(self._caller)
            self._caller, self._depth = None, 0


class _Hook:
    """A hook that does nothing after its listener is gone, or in a copy of the model."""

    def __init__(self, listener: SharedEvaluation | None, name: str) -> None:
        self._listener = weakref.ref(listener) if listener is not None else None
        self._name = name

    def __call__(self, *given: Any) -> Any:
        listener = self._listener() if self._listener is not None else None
        return None if listener is None else getattr(listener, self._name)(*given)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Hook":
        return _Hook(None, self._name)

    def __reduce__(self) -> Any:
        return _Hook, (None, self._name)
