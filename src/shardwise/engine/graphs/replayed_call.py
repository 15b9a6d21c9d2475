"""A replayed call as a node of autograd.

Its backward replays the recorded one where that is safe. Otherwise the unit's forward is computed again from its
inputs, which are intact until then, and autograd goes back through it: for a backward that keeps its graph, for
gradients of gradients, for another pattern of gradients, or where a replay would overwrite what is still needed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.base.torch_internals import torch_private
from shardwise.engine.core.parameters import unguarded
from shardwise.engine.graphs.handed_gradients import Edges
from shardwise.engine.graphs.recorded_call import Grads, RecordedCall
from shardwise.engine.graphs.static_place import StaticPlace


class BackwardReplays(Protocol):
    """The methods of RecordedPass that are called here."""

    def replay_backward(
        self, call: RecordedCall, given: Sequence[Any], grads: Grads, *, edges: Edges
    ) -> list[Tensor | None] | None:
        """Replay or record the backward of a call; None if that is not possible."""

    def end_call(self, call: RecordedCall) -> None:
        """Note that the backward of a call is over."""


class ReplayedCall:
    """A call whose forward was replayed, until its backward is over or autograd has dropped it."""

    def __init__(self, call: RecordedCall, passes: BackwardReplays, *, given: Sequence[Any], random_state: Any) -> None:
        self.call = call
        self.is_over = False
        self._passes = passes
        # What has a gradient, also for gradients of gradients; and what a graph reads where it is.
        self._reached = {number: given[number] for number in call.reached}
        copied = set(call.numbers)
        self._given: list[Any] = [None if number in copied else one for number, one in enumerate(given)]
        self._versions = self._param_versions()
        self._random_state = random_state

    def _param_versions(self) -> list[int]:
        with unguarded():
            return [self._given[number]._version for number in self.call.params]

    def apply(self) -> tuple[Tensor, ...]:
        """Return the call's outputs, as results of a node of autograd."""
        outputs: tuple[Tensor, ...] = _Replay.apply(self, *map(self._reached.get, self.call.reached))  # type: ignore[no-untyped-call]
        return outputs

    def backward(self, grads: Grads, *, edges: Edges) -> Sequence[Tensor | None]:
        if self.is_over:
            raise RuntimeError(
                "Trying to backward through the graph a second time: specify retain_graph=True in the first backward"
            )
        if self._versions != self._param_versions():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of {self.call.unit.name} changed between forward and backward; step the optimizer "
                "after backward"
            )
        keeps_graph = torch.is_grad_enabled() or torch_private.keeps_graph()
        with self._at_forward():
            found: Sequence[Tensor | None] | None
            if all(grad is None for grad in grads):
                # A later autograd.Function has returned None.
                found = [None] * len(self.call.reached)
            else:
                found = None
                if not keeps_graph:
                    found = self._passes.replay_backward(self.call, self._given, grads, edges=edges)
            if found is None:
                found = self._recomputed(grads)
        if not keeps_graph:
            self.is_over = True
            self._given, self._reached = [], {}
            self._passes.end_call(self.call)
        return found

    @contextmanager
    def _at_forward(self) -> Iterator[None]:
        """Draw the random numbers of the forward again, where backward computes it again."""
        if not self.call.draws:
            yield
            return
        device = self.call.device
        random_state = device.random_state()
        device.set_random_state(self._random_state)
        try:
            yield
        finally:
            device.set_random_state(random_state)

    def _recomputed(self, grads: Grads) -> Sequence[Tensor | None]:
        """Compute the forward again and go back through it."""
        call, graph_of_grads = self.call, torch.is_grad_enabled()
        entries = list(self._given)
        for number, place, needs_grad in zip(call.numbers, call.inputs, call.needs_grad, strict=True):
            if number in self._reached and graph_of_grads:
                entries[number] = self._reached[number]
            else:
                entries[number] = place.tensor.detach().requires_grad_(needs_grad)
        for number, copy in call.copies.items():
            entries[number] = copy.tensor.clone()
        with torch.enable_grad(), torch.autocast(**call.autocast):
            results = call.graph.function(*entries)
        outputs = [one for one, result in zip(results, call.results, strict=True) if isinstance(result, StaticPlace)]
        pairs = [(one, grad) for one, grad in zip(outputs, grads, strict=True) if grad is not None]
        with unguarded():
            found = torch.autograd.grad(
                [output for output, _ in pairs],
                [entries[number] for number in self._reached],
                [grad for _, grad in pairs],
                allow_unused=True,
                create_graph=graph_of_grads,
            )
        left = dict(zip(self._reached, found, strict=True))
        return [left.pop(number, None) for number in call.reached]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replayed: ReplayedCall, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.replayed = replayed
        ctx.set_materialize_grads(False)
        call = replayed.call
        outputs = tuple(call.lend())
        plain = [one for one, has_grad in zip(outputs, call.differentiable, strict=True) if not has_grad]
        ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, *ctx.replayed.backward(grads, edges=ctx.next_functions))
