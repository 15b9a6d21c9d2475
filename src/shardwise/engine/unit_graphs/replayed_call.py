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
from torch.utils._pytree import tree_leaves

from shardwise.engine.core.flat_buffers import unguarded
from shardwise.engine.unit_graphs.call_form import mapped
from shardwise.engine.unit_graphs.recorded_call import Grads, RecordedCall
from shardwise.engine.unit_graphs.static_place import StaticPlace
from shardwise.torch_internals import torch_private


class BackwardReplays(Protocol):
    """The methods of RecordedPass that are called here."""

    def replay_backward(self, call: RecordedCall, grads: Grads) -> list[Tensor | None] | None:
        """Replay or record the backward of a call; None if that is not possible."""

    def end_call(self, call: RecordedCall) -> None:
        """Note that the backward of a call is over."""


class ReplayedCall:
    """A call whose forward was replayed, until its backward is over or autograd has dropped it."""

    def __init__(
        self, call: RecordedCall, passes: BackwardReplays, *, given: Sequence[Tensor], random_state: Any
    ) -> None:
        self.call = call
        self.is_over = False
        self._passes = passes
        # The given tensors that have a gradient, for gradients of gradients.
        self._given = {number: given[number] for number in call.reached_inputs}
        self._versions = call.watched.versions()
        self._random_state = random_state

    def apply(self) -> tuple[Tensor, ...]:
        """Return the call's outputs, as results of a node of autograd."""
        outputs: tuple[Tensor, ...] = _Replay.apply(self, *self._given.values(), *self._params())  # type: ignore[no-untyped-call]
        return outputs

    def _params(self) -> list[Tensor]:
        return [self.call.watched.params[number] for number in self.call.reached_params]

    def backward(self, grads: Grads) -> Sequence[Tensor | None]:
        if self.is_over:
            raise RuntimeError(
                "Trying to backward through the graph a second time: specify retain_graph=True in the first backward"
            )
        if self._versions != self.call.watched.versions():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of {self.call.watched.name} changed between forward and backward; step the optimizer "
                "after backward"
            )
        keeps_graph = torch.is_grad_enabled() or torch_private.keeps_graph()
        with self._at_forward():
            found: Sequence[Tensor | None] | None
            if all(grad is None for grad in grads):
                # A later autograd.Function has returned None.
                found = [None] * (len(self.call.reached_inputs) + len(self.call.reached_params))
            else:
                found = None if keeps_graph else self._passes.replay_backward(self.call, grads)
            if found is None:
                found = self._recomputed(grads)
        if not keeps_graph:
            self.is_over = True
            self._given = {}
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
        call = self.call
        graph_of_grads = torch.is_grad_enabled()
        entries = [
            self._given[number]
            if number in self._given and graph_of_grads
            else place.tensor.detach().requires_grad_(call.needs_grad[number])
            for number, place in enumerate(call.inputs)
        ]
        by_place = {id(place): entry for place, entry in zip(call.inputs, entries, strict=True)}
        inputs, options = mapped(call.call, StaticPlace, lambda place: by_place[id(place)])
        buffers = [(namespace, name, place.tensor) for namespace, name, place in call.buffers]
        unit = call.watched.recomputed
        with torch.enable_grad(), torch.autocast(**call.autocast), unit.without_trace(buffers=buffers):
            leaves = tree_leaves(call.watched.forward(*inputs, **options))
        outputs = [leaf for leaf, result in zip(leaves, call.results, strict=True) if isinstance(result, StaticPlace)]
        pairs = [(one, grad) for one, grad in zip(outputs, grads, strict=True) if grad is not None]
        leaves = [*(entries[number] for number in call.reached_inputs), *self._params()]
        with unguarded():
            return torch.autograd.grad(
                [output for output, _ in pairs],
                leaves,
                [grad for _, grad in pairs],
                allow_unused=True,
                create_graph=graph_of_grads,
            )


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replayed: ReplayedCall, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.replayed = replayed
        ctx.set_materialize_grads(False)
        call = replayed.call
        outputs = tuple(place.lend() for place in call.outputs)
        plain = [one for one, has_grad in zip(outputs, call.differentiable, strict=True) if not has_grad]
        ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return (None, *ctx.replayed.backward(grads))
