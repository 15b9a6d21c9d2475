"""The inputs of one call of a traced graph: which are copied to places, and what must be equal for a replay."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardwise.engine.core.inference_tensors import normal
from shardwise.engine.core.parameters import unguarded
from shardwise.engine.graphs.graph_device import GraphDevice
from shardwise.engine.graphs.not_captured import NotCaptured
from shardwise.engine.graphs.torch_modes import torch_modes
from shardwise.engine.graphs.traced_graph import TracedGraph
from shardwise.engine.graphs.traced_unit import TracedUnit

Form = tuple[Any, ...]


class Refused(NotCaptured):
    """A graph cannot be replayed. Nothing was recorded, or it was recorded as it should be and is not used."""


class GivenInputs:
    """The inputs of one call of a traced graph, by their numbers.

    form      what must be equal for a replay
    places    the numbers of those that are copied to a place; the others are read where they are, or are plain values
    gathered  the numbers of parameters
    tensors   those that are copied
    """

    def __init__(self, unit: TracedUnit, graph: TracedGraph, inputs: Sequence[Any], *, device: GraphDevice) -> None:
        self.inputs = inputs
        self.places: list[int] = []
        self.gathered: list[int] = []
        form: dict[int, Any] = {}
        params = unit.takers
        for number, one in enumerate(inputs):
            if id(one) in params:
                self.gathered.append(number)
                form[number] = one.requires_grad
            elif number in graph.free:
                continue
            elif not isinstance(one, Tensor):
                # With its type, because True == 1 == 1.0.
                form[number] = (type(one), one)
            elif unit.is_gathered(one):
                self.gathered.append(number)
                form[number] = one.requires_grad
            elif device.is_on_host(one):
                form[number] = _value(one)
            elif number in graph.in_place:
                form[number] = one.data_ptr()
            else:
                self.places.append(number)
                form[number] = (one.shape, one.stride(), one.dtype, one.requires_grad)
        # Once: an inference tensor becomes another normal one each time.
        self.tensors = [normal(inputs[number]) for number in self.places]
        if graph.written and self._overlap(graph):
            raise Refused("it writes into memory of another input")
        with unguarded():
            addresses = unit.addresses([inputs[number] for number in self.gathered])
        self.form = (form, addresses, unit.is_checkpointed, torch_modes(unit.device.type))

    def _overlap(self, graph: TracedGraph) -> bool:
        written = {memory(self.inputs[number]) for number in graph.written}
        others = [
            one for number, one in enumerate(self.inputs) if isinstance(one, Tensor) and number not in graph.written
        ]
        return any(one.untyped_storage().data_ptr() in written for one in others)

    def differs(self, recorded: Form) -> list[int]:
        """Return the numbers of the inputs that differ from those of a recorded form."""
        form = recorded[0]
        return [number for number, one in self.form[0].items() if form.get(number) != one]


def _value(tensor: Tensor) -> Any:
    if tensor.numel() != 1 or tensor.requires_grad:
        raise Refused("it computes with a tensor in host memory")
    return (tensor.dtype, tensor.shape, tensor.item())


def memory(tensor: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()
