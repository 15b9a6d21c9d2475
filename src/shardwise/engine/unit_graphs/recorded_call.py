"""The two graphs of one call of a unit: its forward and its backward, recorded while a pass runs.

The forward graph reads its inputs at fixed places and the unit's parameters where the unit is gathered. Autograd's
graph of the recorded forward is used once, to record the backward; replays need neither.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shardwise.engine.core.flat_buffers import parameter_like, unguarded
from shardwise.engine.graphs.python_state import PLAIN
from shardwise.engine.graphs.reads import NotCaptured
from shardwise.engine.unit_graphs.call_form import mapped
from shardwise.engine.unit_graphs.graph_device import Graph, GraphDevice
from shardwise.engine.unit_graphs.static_place import StaticPlace, empty_like
from shardwise.engine.unit_graphs.watched_unit import WatchedUnit

Grads = tuple[Tensor | None, ...]


class RecordedCall:
    """One call of a unit at one position of a pass.

    number       its position among the calls of the pass
    form, key    what must be equal for a replay: the form of the inputs, and the unit's state
    results      what it returns, in order: a place, (the number of an input that is passed on,), or a plain value
    outputs      the places among them; `differentiable`: which of them have gradients
    """

    def __init__(self, watched: WatchedUnit, *, number: int, form: Any, key: Any, device: GraphDevice) -> None:
        self.watched = watched
        self.number = number
        self.form = form
        self.key = key
        self.device = device
        self.addresses = watched.addresses()
        # The call with places for tensors; the places, each once; and those that no earlier call had.
        self.call: tuple[Any, Any] = ((), {})
        self.inputs: list[StaticPlace] = []
        self.made: list[StaticPlace] = []
        # What the unit's buffers were before its forward, which may write them: (the module's buffers, name, place).
        self.buffers: list[tuple[dict[str, Any], str, StaticPlace]] = []
        self.needs_grad: list[bool] = []
        # The inputs and the parameters, by number, that autograd comes to from the outputs.
        self.reached_inputs: list[int] = []
        self.reached_params: list[int] = []
        self.results: list[Any] = []
        self.outputs: list[StaticPlace] = []
        self.differentiable: list[bool] = []
        self.tree: TreeSpec
        # Whether its forward draws random numbers; known after its first replay.
        self.draws = False
        self.autocast = _autocast(watched.device.type)
        self.forward: Graph
        self.trains = torch.is_grad_enabled()
        # Once its backward is recorded.
        self.backward: Graph | None = None
        self.pattern: tuple[bool, ...] = ()
        self.grad_places: list[StaticPlace | None] = []
        self.grads: list[StaticPlace | None] = []
        # Places that were still lent when its backward was recorded: the graph does not write there.
        self.spares: set[StaticPlace] = set()
        # Until then: the parameters with which its forward was recorded, and autograd's graph of it.
        self._aliases: list[nn.Parameter] = []
        self._leaves: list[Tensor] = []
        self._outputs: list[Tensor] = []

    # Recording

    def record(
        self, call: tuple[Any, Any], tensors: Sequence[Tensor], *, place_of: Callable[[Tensor], StaticPlace | None]
    ) -> None:
        """Record the forward of a call with these tensors; `place_of` finds those that are in a place already."""
        params = self.watched.params
        with unguarded():
            aliases = [parameter_like(param, param.detach()) for param in params]
        self._aliases = aliases
        known = [place_of(tensor) for tensor in tensors]
        entries: list[Tensor] = []

        def compute() -> Any:
            owners = [
                empty_like(tensor) if place is None else _owner(place)
                for tensor, place in zip(tensors, known, strict=True)
            ]
            entries.extend(
                owner.detach().requires_grad_(tensor.requires_grad)
                for owner, tensor in zip(owners, tensors, strict=True)
            )
            by_tensor = {id(tensor): entry for tensor, entry in zip(tensors, entries, strict=True)}
            inputs, options = mapped(call, Tensor, lambda tensor: by_tensor[id(tensor)])
            buffers = self.watched.recomputed.copy_buffers() if self.trains and self.watched.writes_buffers else []
            with self.watched.with_params(aliases), _without_autocast_cache(self.watched.device.type):
                return owners, buffers, self.watched.forward(*inputs, **options)

        self.forward, (owners, buffers, outputs) = self.device.record(compute)
        self.buffers = [(namespace, name, self.device.place(copy)) for namespace, name, copy in buffers]
        self.needs_grad = [tensor.requires_grad for tensor in tensors]
        self.inputs = [
            self.device.place(owner) if place is None else place for owner, place in zip(owners, known, strict=True)
        ]
        self.made = [made for made, place in zip(self.inputs, known, strict=True) if place is None]
        self.made += [place for _, _, place in self.buffers]
        by_input = {id(tensor): place for tensor, place in zip(tensors, self.inputs, strict=True)}
        self.call = mapped(call, Tensor, lambda tensor: by_input[id(tensor)])
        leaves, self.tree = tree_flatten(outputs)
        self._find_results(leaves, entries=entries, aliases=aliases)
        self._find_leaves(entries=entries, aliases=aliases)

    def _find_results(self, leaves: list[Any], *, entries: list[Tensor], aliases: Sequence[Tensor]) -> None:
        taken = {tensor.untyped_storage().data_ptr() for tensor in (*entries, *aliases) if tensor.numel()}
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                if not isinstance(leaf, PLAIN):
                    raise NotCaptured(f"it returns a {type(leaf).__name__}")
                self.results.append(leaf)
                continue
            passed_on = [number for number, entry in enumerate(entries) if leaf is entry]
            if passed_on:
                # As a tuple, because a number may be a result.
                self.results.append((passed_on[0],))
                continue
            if type(leaf) is not Tensor or leaf.device.type != self.watched.device.type:
                raise NotCaptured("it returns a tensor of another kind or on another device")
            if leaf.untyped_storage().data_ptr() in taken:
                raise NotCaptured("it returns a view of an input or of a parameter")
            taken.add(leaf.untyped_storage().data_ptr())
            self.results.append(self.device.place(leaf))
            self._outputs.append(leaf)
        self.outputs = [result for result in self.results if isinstance(result, StaticPlace)]
        self.differentiable = [output.requires_grad for output in self._outputs]

    def _find_leaves(self, *, entries: list[Tensor], aliases: Sequence[Tensor]) -> None:
        """Find what autograd comes to: a replay gives nothing to a layer that was not called, not even None."""
        reached = set(map(id, _leaves_of(self._outputs)))
        if not reached.issubset(map(id, (*entries, *aliases))):
            raise NotCaptured("it computes with parameters that its modules do not hold by name")
        self.reached_inputs = [number for number, entry in enumerate(entries) if id(entry) in reached]
        self.reached_params = [number for number, alias in enumerate(aliases) if id(alias) in reached]
        self._leaves = [
            *(entries[number] for number in self.reached_inputs),
            *(aliases[number] for number in self.reached_params),
        ]

    def record_backward(
        self, grads: Grads, *, place_of: Callable[[Tensor], StaticPlace | None], spares: set[StaticPlace]
    ) -> None:
        """Record the backward for gradients of this pattern; the memory of the forward is free afterwards."""
        known = [None if grad is None else place_of(grad) for grad in grads]

        def compute() -> Any:
            owners = [
                None if grad is None else empty_like(grad) if place is None else _owner(place)
                for grad, place in zip(grads, known, strict=True)
            ]
            pairs = [(output, owner) for output, owner in zip(self._outputs, owners, strict=True) if owner is not None]
            # A function may call modules again in its backward, as tiles do.
            with self.watched.with_params(self._aliases):
                found = torch.autograd.grad(
                    [output for output, _ in pairs], self._leaves, [owner for _, owner in pairs], allow_unused=True
                )
            return owners, found

        graph, (owners, found) = self.device.record(compute)
        self.grad_places = [
            place or (None if owner is None else self.device.place(owner))
            for owner, place in zip(owners, known, strict=True)
        ]
        self.grads = [None if grad is None else self.device.place(grad) for grad in found]
        self.made += [new for new, place in zip(self.grad_places, known, strict=True) if new and place is None]
        self.pattern = tuple(grad is not None for grad in grads)
        self.spares = spares
        self.backward = graph
        self.forget_autograd()

    def forget_autograd(self) -> None:
        """Drop autograd's graph of the recorded forward; no backward will be recorded from it."""
        self._aliases, self._leaves, self._outputs = [], [], []

    # Replays

    def load(self, places: Sequence[StaticPlace | None], tensors: Sequence[Tensor | None], *, pass_number: int) -> bool:
        """Copy tensors to their places; return False, without copying, if a place is taken in this pass."""
        pairs = [(p, t) for p, t in zip(places, tensors, strict=True) if p is not None and t is not None]
        if not all(place.can_load(tensor, pass_number=pass_number) for place, tensor in pairs):
            return False
        for place, tensor in pairs:
            place.load(tensor, pass_number=pass_number)
        return True

    def structured(self, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:
        """Return the call's result, made of its outputs and of inputs that are passed on."""
        left = iter(outputs)
        leaves = [
            next(left)
            if isinstance(result, StaticPlace)
            else tensors[result[0]]
            if isinstance(result, tuple)
            else result
            for result in self.results
        ]
        return tree_unflatten(leaves, self.tree)

    def release(self) -> None:
        """Destroy the graphs."""
        self.forget_autograd()
        self.forward.reset()
        if self.backward is not None:
            self.backward.reset()


def _autocast(device_type: str) -> dict[str, Any]:
    """Return the options of torch.autocast that are in force."""
    return {
        "device_type": device_type,
        "enabled": torch.is_autocast_enabled(device_type),
        "dtype": torch.get_autocast_dtype(device_type),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


@contextmanager
def _without_autocast_cache(device_type: str) -> Iterator[None]:
    """Cast weights inside the graph each time: a cached copy would be in memory that other graphs write.

    Outside of autocast nothing is changed: code that was compiled with the cache enabled would be compiled again.
    """
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled and not torch.is_autocast_enabled(device_type))
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _owner(place: StaticPlace) -> Tensor:
    assert place.owner is not None
    return place.owner


def _leaves_of(outputs: Sequence[Tensor]) -> list[Any]:
    """Return the leaves of autograd's graph of these outputs."""
    found, seen = [], set()
    stack = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.append(variable)
        stack += [below for below, _ in node.next_functions if below is not None]
    return found
