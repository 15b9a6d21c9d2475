"""The two graphs of one call of a traced graph: its forward and its backward, recorded while a pass runs.

The forward graph reads what it is given at fixed places, and the unit's parameters and buffers where they are.
Autograd's graph of the recorded forward is used once, to record the backward; replays need neither.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.core.parameters import parameter_like, unguarded
from shardwise.engine.graphs.given_inputs import GivenInputs, Refused, memory
from shardwise.engine.graphs.graph_device import Graph, GraphDevice
from shardwise.engine.graphs.leaf_edges import LeafEdge, edges_to_leaves, gradients_by_edge
from shardwise.engine.graphs.static_place import StaticPlace, at, empty_like
from shardwise.engine.graphs.traced_graph import Outputs, TracedGraph
from shardwise.engine.graphs.traced_unit import TracedUnit

Grads = tuple[Tensor | None, ...]
PlaceOf = Callable[[Tensor], StaticPlace | None]


class RecordedCall:
    """One call of a traced graph at one position of a pass.

    number       its position among the calls of the pass
    form         what must be equal for a replay (GivenInputs)
    gathered     the numbers of inputs that lie where parameters are gathered; params: those that are parameters
    inputs       the places of the inputs that are copied; `made`: those that no earlier call had
    results      what it returns, in order: a place, (the number of an input that is passed on,), or None: a number
    outputs      the places among them; `differentiable`: which of them have gradients
    """

    def __init__(
        self, unit: TracedUnit, graph: TracedGraph, given: GivenInputs, *, number: int, device: GraphDevice
    ) -> None:
        self.unit, self.graph = unit, graph
        self.number = number
        self.form = given.form
        self.device = device
        self.numbers = given.places
        self.gathered = given.gathered
        self.params = [number for number in given.gathered if isinstance(given.inputs[number], nn.Parameter)]
        self.inputs: list[StaticPlace] = []
        self.made: list[StaticPlace] = []
        # What inputs that the forward writes were before it, by their numbers.
        self.copies: dict[int, StaticPlace] = {}
        self.needs_grad: list[bool] = []
        # What autograd comes to from the outputs: numbers of what the graph's function is given.
        self.reached: list[int] = []
        self.results: list[Any] = []
        self.outputs: list[StaticPlace] = []
        self.differentiable: list[bool] = []
        # Whether its forward draws random numbers; known after its first replay.
        self.draws = False
        self.autocast = _autocast(unit.device.type)
        self.forward: Graph
        self.trains = torch.is_grad_enabled()
        # Once its backward is recorded.
        self.backward: Graph | None = None
        self.pattern: tuple[bool, ...] = ()
        self.grad_places: list[StaticPlace | None] = []
        self.grads: list[StaticPlace | None] = []
        # Places that were still lent when its graphs were recorded: they do not write there.
        self.spares: set[StaticPlace] = set()
        # Until then: autograd's graph of the recorded forward.
        self._edges: list[LeafEdge] = []
        self._outputs: list[Tensor] = []

    # Recording

    def record(self, given: GivenInputs, *, place_of: PlaceOf) -> None:
        """Record the forward of a call with these inputs; `place_of` finds those that are in a place already."""
        tensors = given.tensors
        known = [place_of(tensor) for tensor in tensors]
        entries = list(given.inputs)
        with unguarded():
            for number, one in enumerate(entries):
                if isinstance(one, nn.Parameter):
                    entries[number] = parameter_like(one, one.detach())
                elif isinstance(one, Tensor):
                    # With a version of its own: autograd's graph of the recording outlives replays, which write it.
                    entries[number] = one.data
        written = self.graph.written if self.trains else set()

        def compute() -> Any:
            owners = [
                empty_like(tensor) if place is None else _owner(place)
                for tensor, place in zip(tensors, known, strict=True)
            ]
            for number, owner in zip(self.numbers, owners, strict=True):
                entries[number] = owner.detach().requires_grad_(given.inputs[number].requires_grad)
            copies = {number: entries[number].clone() for number in written}
            with _without_autocast_cache(self.unit.device.type):
                return owners, copies, self.unit.function_of(self.graph)(*entries)

        self.forward, (owners, copies, outputs) = self.device.record(compute)
        self.copies = {number: self.device.place(copy) for number, copy in copies.items()}
        self.needs_grad = [tensor.requires_grad for tensor in tensors]
        self.inputs = [
            self.device.place(owner) if place is None else place for owner, place in zip(owners, known, strict=True)
        ]
        self.made = [made for made, place in zip(self.inputs, known, strict=True) if place is None]
        self.made += self.copies.values()
        try:
            self._find_results(outputs, entries=entries)
            self._find_leaves(entries)
        except Refused:
            self.release()
            raise

    def _find_results(self, outputs: Outputs, *, entries: list[Any]) -> None:
        given = {memory(entry) for entry in entries if isinstance(entry, Tensor) and entry.numel()}
        taken: set[int] = set()
        for leaf in outputs:
            passed_on = [number for number, entry in enumerate(entries) if leaf is entry]
            if isinstance(leaf, Tensor) and passed_on:
                # As a tuple, because a number may be a result.
                self.results.append((passed_on[0],))
            elif isinstance(leaf, Tensor):
                self.results.append(self._place_of_result(leaf, given=given, taken=taken))
            elif leaf is None or (self.graph.numbers is not None and isinstance(leaf, int | float)):
                self.results.append(None)
            else:
                raise Refused(f"it returns a {type(leaf).__name__}")
        self.outputs = [result for result in self.results if isinstance(result, StaticPlace)]
        self.differentiable = [output.requires_grad for output in self._outputs]

    def _place_of_result(self, leaf: Tensor, *, given: set[int], taken: set[int]) -> StaticPlace:
        if type(leaf) is not Tensor or self.device.is_on_host(leaf):
            raise Refused("it returns a tensor of another kind or on another device")
        if memory(leaf) in given:
            raise Refused("it returns a view of an input or of a parameter")
        if leaf.requires_grad and memory(leaf) in taken:
            raise Refused("it returns several views of one tensor")
        if leaf.requires_grad:
            taken.add(memory(leaf))
        self._outputs.append(leaf)
        return self.device.place(leaf)

    def _find_leaves(self, entries: list[Any]) -> None:
        """Find what autograd comes to: a replay gives nothing to a layer that was not called, not even None."""
        edges = edges_to_leaves(self._outputs)
        numbers = {id(entry): number for number, entry in enumerate(entries)}
        if any(id(edge.leaf) not in numbers for edge in edges):
            raise Refused("it computes with parameters that are no inputs of its graph")
        if not self.unit.has_breaks:
            edges = list({id(edge.leaf): edge for edge in edges}.values())
        self._edges = edges
        self.reached = [numbers[id(edge.leaf)] for edge in edges]

    def record_backward(self, grads: Grads, *, place_of: PlaceOf, spares: set[StaticPlace]) -> None:
        """Record the backward for gradients of this pattern; the memory of the forward is free afterwards."""
        known = [None if grad is None else place_of(grad) for grad in grads]

        def compute() -> Any:
            owners = [
                None if grad is None else empty_like(grad) if place is None else _owner(place)
                for grad, place in zip(grads, known, strict=True)
            ]
            pairs = [(output, owner) for output, owner in zip(self._outputs, owners, strict=True) if owner is not None]
            return owners, gradients_by_edge(pairs, edges=self._edges)

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
        self._edges, self._outputs = [], []

    # Replays

    def is_at_home(self, given: Sequence[Any]) -> bool:
        """Return whether the parameters are where its graphs read them."""
        with unguarded():
            return self.unit.addresses([given[number] for number in self.gathered]) == self.form[1]

    def load(self, places: Sequence[StaticPlace | None], tensors: Sequence[Tensor | None], *, pass_number: int) -> bool:
        """Copy tensors to their places; return False, without copying, if a place is taken in this pass."""
        pairs = [(p, t) for p, t in zip(places, tensors, strict=True) if p is not None and t is not None]
        if not all(place.can_load(tensor, pass_number=pass_number) for place, tensor in pairs):
            return False
        for place, tensor in pairs:
            place.load(tensor, pass_number=pass_number)
        return True

    def lend(self) -> list[Tensor]:
        """Return the outputs; copies of those that are kept, and of what shares their memory."""
        kept = [self.outputs[number].tensor for number in self.graph.copied_outputs()]
        copies = {address: _copied(tensor) for address, tensor in {memory(tensor): tensor for tensor in kept}.items()}
        return [
            at(place.tensor, copies[memory(place.tensor)]) if memory(place.tensor) in copies else place.lend()
            for place in self.outputs
        ]

    def write_back(self, inputs: Sequence[Any]) -> None:
        """Do what the forward does to inputs that it writes."""
        places = dict(zip(self.numbers, self.inputs, strict=True))
        for number in self.graph.written:
            given, place = inputs[number], places.get(number)
            is_counted = number in self.graph.counted
            if place is not None and given.data_ptr() != place.pointer:
                with torch.no_grad():
                    (given if is_counted or given.is_inference() else given.data).copy_(place.tensor)
            elif is_counted and not given.is_inference():
                torch.autograd.graph.increment_version(given)

    def returned(self, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Outputs:
        """Return the call's results, of which these are the outputs."""
        left = iter(outputs)
        numbers = self.graph.numbers(*inputs) if self.graph.numbers is not None else [None] * len(self.results)
        return tuple(
            next(left) if isinstance(result, StaticPlace) else number if result is None else inputs[result[0]]
            for result, number in zip(self.results, numbers, strict=True)
        )

    def release(self) -> None:
        """Destroy the graphs."""
        self.forget_autograd()
        self.forward.reset()
        if self.backward is not None:
            self.backward.reset()


def _copied(tensor: Tensor) -> torch.UntypedStorage:
    storage: torch.UntypedStorage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
    return storage


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
