"""`optimizer.step(closure)`: gradients come inside the step, so what precedes an update follows on the closure."""

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer

from shardwise.errors import InvalidModel


class StepClosure:
    """A step of one optimizer, with a closure or without: `ready` is called once the gradients are there.

    A subclass whose step calls its parent's has steps inside a step, and torch calls the hooks of each.
    """

    def __init__(self, ready: Callable[[], None]) -> None:
        self._ready = ready
        self._is_ready = True
        # Steps that began and did not end, which those that raised never do.
        self._depth = 0

    def begin(
        self, arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of a step (the optimizer is the first), to be used in place of those given.

        None for a step inside another one.
        """
        if self._depth and _is_inside_step(arguments[0]):
            self._depth += 1
            return None
        self._depth = 1
        self._is_ready = True
        closure = options["closure"] if "closure" in options else arguments[1] if len(arguments) > 1 else None
        if not callable(closure):
            self._ready()
            return tuple(arguments), dict(options)
        self._is_ready = False

        def then_ready() -> Any:
            loss = closure()
            with torch.no_grad():
                self._ready()
            self._is_ready = True
            return loss

        if "closure" in options:
            return tuple(arguments), {**options, "closure": then_ready}
        return (arguments[0], then_ready, *arguments[2:]), dict(options)

    def end(self, optimizer: Optimizer) -> bool:
        """End a step. Returns False for a step inside another one."""
        if self._depth > 1 and _is_inside_step(optimizer):
            self._depth -= 1
            return False
        self._depth = 0
        return True

    def check(self) -> None:
        """Refuse a step that did not call its closure."""
        if not self._is_ready:
            self._is_ready = True
            raise InvalidModel(
                "optimizer.step(closure): this optimizer did not call the closure; call step() without one"
            )


def _is_inside_step(optimizer: Optimizer) -> bool:
    """Return whether a step's hook is called by a step inside another one of the same optimizer.

    By the stack, down from the hook to the outer step. Called only after a step that began and did not end: its hooks
    cannot show whether it still runs or has raised.
    """
    frame: FrameType | None = sys._getframe(1)
    num_steps = 0
    while frame is not None and num_steps < 2:
        is_step = frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == "torch.optim.optimizer"
        num_steps += is_step and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return num_steps > 1
