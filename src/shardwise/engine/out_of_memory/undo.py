"""Undoes a step before its update, so that it can run again: restores everything that outlives it.

Parameters and optimizer state change only in the update. The passes change tensors that modules write (BatchNorm's
statistics), random numbers and gradients. A captured step copies the tensors inside its graph
(captured/step_graphs.py); an ordinary one copies them before it begins.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from shardwise.engine.core.flat_buffers import unguarded
from shardwise.engine.engine import Engine
from shardwise.engine.random_states import random_states, restore_random_states


class WrittenTensors:
    """Tensors that a step writes besides parameters, gradients and optimizer state, and copies of them."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._copies = [torch.empty_like(tensor) for tensor in self._tensors]

    @torch.no_grad()
    def note(self) -> None:
        """Copy the tensors before the step."""
        if self._tensors:
            torch._foreach_copy_(self._copies, self._tensors)

    @torch.no_grad()
    def undo(self) -> None:
        if self._tensors:
            torch._foreach_copy_(self._tensors, self._copies)

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.nbytes for copy in self._copies)


class StepStart:
    """The state at an ordinary step's start: the model's buffers, random generators, and gradients."""

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._engine = engine
        self._written = WrittenTensors(model.buffers())
        self._written.note()
        self._random = random_states(engine.device)
        self._mark = engine.core.mark()
        self._grads = _GradsBefore(engine)

    @property
    def learned(self) -> bool:
        """Whether the order of the units was known before the step."""
        return self._mark.learned

    @property
    def copied_bytes(self) -> int:
        """Device memory of its copies, if the step begins without gradients."""
        return self._written.num_bytes

    def undo(self, *, keeps_order: bool = False) -> None:
        """Restore the state, after the last pass and before the update.

        `keeps_order`: the passes were complete on all ranks, so the order that a first step has learned is kept.
        """
        self._written.undo()
        restore_random_states(self._random, device=self._engine.device)
        self._grads.undo()
        self._engine.core.rewind(self._mark, keeps_order=keeps_order)


class _GradsBefore:
    """Gradients of earlier backwards: most steps begin with none."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        with unguarded():
            self._shown = {p: p.grad for flat in engine.flats for p in flat.params if p.grad is not None}
        self._owned = {
            part.parameter: part.parameter.grad
            for flat in engine.flats
            for part in flat.owned
            if part.parameter.grad is not None
        }
        self._copies = [(grad, grad.clone()) for grad in {*self._shown.values(), *self._owned.values()}]
        self._held = {key: view.clone() for key, view in engine.core.held().items()}

    @torch.no_grad()
    def undo(self) -> None:
        for grad, copy in self._copies:
            grad.copy_(copy)
        for flat in self._engine.flats:
            flat.drop_grads(range(len(flat.params)))
            with unguarded():
                for index, parameter in enumerate(flat.params):
                    parameter.grad = self._shown.get(parameter)
                    if flat.shows_grads and flat.is_separate:
                        flat.shown[index] = parameter.grad
            for part in flat.owned:
                if part.parameter in self._owned:
                    part.parameter.grad = self._owned[part.parameter]
        if self._held:
            self._engine.core.hold(dict(self._held))
