"""A unit whose calls may be graphs: its traced forward, its plain one, and why it may have to stay ordinary."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.activations.recompute import recompute_graph
from shardwise.engine.activations.selective import Products
from shardwise.engine.core.core import Core
from shardwise.engine.core.parameters import unguarded
from shardwise.engine.core.unit import Unit
from shardwise.engine.graphs.traced_graph import Outputs, TracedGraph, running
from shardwise.engine.graphs.tracer import Tracer
from shardwise.program.units.scripted import is_scripted

# Calls without a graph, of a unit that has never had one.
_MOST_UNTRACED = 8


class TracedUnit:
    """A unit whose calls may be replayed.

    takers    what takes a parameter's gradient, and its number there, by the parameter's id
    traced    its forward without recomputation, which is that of each graph, and compiler, which the tracer calls
    why_not   the reason why its calls are not replayed, in one line; "" if there is none
    """

    def __init__(
        self,
        unit: Unit,
        traced: Callable[..., Any],
        *,
        units: Sequence[Unit],
        recompute: str,
        tracer: Tracer,
        device: torch.device,
    ) -> None:
        self.unit = unit
        self.name = unit.name
        self.module = unit.module
        self.forward: Callable[..., Any] = unit.module.forward
        self._inner = traced
        self.device = device
        self._units = units
        self._tracer = tracer
        self._recompute = recompute
        self._products = Products() if recompute == "selective" else None
        # Whether the current call is inside of a checkpoint of the user, and whether one has written Python state.
        self.is_checkpointed = self.writes_python = False
        self.renew()

    def renew(self) -> None:
        """Begin again: the model has changed."""
        self.why_not = self._why_never()
        self._full = {flat.full.buffer.untyped_storage()._cdata for flat in self.unit.flats}
        self.takers = {id(one): (flat.grads, at) for flat in self.unit.flats for at, one in enumerate(flat.params)}
        self._graphs: list[TracedGraph] = []
        self._num_untraced = 0
        # Whether a call has had several graphs.
        self.has_breaks = False

    def _why_never(self) -> str:
        modules = list(self.module.modules())
        if any(map(is_scripted, modules)):
            return "a module of torch.jit is in it"
        own = set(map(id, modules))
        if any(other is not self.unit and id(other.module) in own for other in self._units):
            return "it contains other units"
        with unguarded():
            if {id(parameter) for parameter in self.module.parameters()} != set(map(id, self.unit.params())):
                return "it shares parameters with another unit"
        if any(_holds_parameters(module) for module in modules):
            return "a module of it holds parameters in lists, as nn.GRU does"
        return ""

    def call(self, inputs: Any, options: Any, *, run: Callable[..., Outputs]) -> Any:
        """Call it; `run(unit, graph, inputs)` runs each graph that is traced of it."""
        function = self._tracer.function(self._inner, names=tuple(options))
        with running(partial(run, self)):
            return function(self._inner, *inputs, **options)

    def note_call(self, *, num_graphs: int) -> None:
        """Note how many graphs the last call has run; after some without any the unit is an ordinary one."""
        self.has_breaks = self.has_breaks or num_graphs > 1
        self._num_untraced += not num_graphs
        if self._num_untraced >= _MOST_UNTRACED and not self._graphs:
            self.why_not = f"torch.compile makes no graph of it ({self._tracer.why_not or 'it computes nothing'})"

    def reason(self) -> str:
        """Return why no call of it is replayed; "" if calls may be."""
        reasons = [graph.why_not for graph in self._graphs]
        return self.why_not or (reasons[0] if reasons and all(reasons) else "")

    def function_of(self, graph: TracedGraph) -> Callable[..., Outputs]:
        """Return the function of a graph, with the recomputation of the plan."""
        if graph not in self._graphs:
            self._graphs.append(graph)
        if self._recompute == "none" and not self.is_checkpointed:
            return graph.function
        written = graph.written if graph.has_run else graph.buffers
        again, products = self.is_checkpointed, None if self.is_checkpointed else self._products
        return partial(recompute_graph, graph.function, written=written, products=products, writes_again=again)

    def is_gathered(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter, or lies where parameters are gathered, as weights in fp8 do."""
        return isinstance(tensor, nn.Parameter) or tensor.untyped_storage()._cdata in self._full

    def addresses(self, params: Sequence[Tensor]) -> list[int]:
        """Return where parameters are now: those of a sharded unit are gathered again for each call."""
        return [param.data_ptr() for param in params]


def traced_unit(unit: Unit, *, core: Core, tracers: dict[str, Tracer]) -> TracedUnit:
    """Return a unit of a core as one that may have graphs; `tracers`: those of the model, by their compilers."""
    plan = core.followed.plan
    compiles, recompute = plan.compiles(unit.name), plan.recompute_of(unit.name)
    # Under selective recomputation ordinary calls are not compiled.
    compiler = plan.compiler if compiles and recompute != "selective" else "none"
    tracer = tracers.setdefault(compiler, Tracer(compiler=compiler))
    forward: Any = unit.module.forward
    for _ in range(compiles + (recompute != "none")):
        forward = forward.__wrapped__
    units = list(core.units.values())
    return TracedUnit(unit, forward, units=units, recompute=recompute, tracer=tracer, device=core.setting.device)


def _holds_parameters(module: nn.Module) -> bool:
    """Return whether it holds parameters besides those that it has by name: it would not compute with others.

    A recurrent layer that finds other parameters even moves them to other memory.
    """
    containers = [value for value in module.__dict__.values() if isinstance(value, list | tuple)]
    return any(isinstance(item, nn.Parameter) for container in containers for item in container)
