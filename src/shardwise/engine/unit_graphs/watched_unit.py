"""A unit's Python state and parameters, and why it may have to stay ordinary.

A replay runs no Python. So what a unit's forward reads in Python is part of a recorded call's key; and a unit whose
forward changes something in Python, reads a value from the device or draws random numbers on the CPU stays ordinary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.comm.groups import num_collectives
from shardwise.engine.activations.recompute import RecomputedUnit
from shardwise.engine.core.flat_buffers import unguarded
from shardwise.engine.core.inference_tensors import uncounted, versions
from shardwise.engine.core.unit import Unit
from shardwise.engine.graphs.python_state import PLAIN, PythonState, foreign_hook
from shardwise.engine.graphs.reads import noting_reads
from shardwise.engine.graphs.torch_modes import torch_modes
from shardwise.engine.unit_graphs.graph_device import GraphDevice
from shardwise.torch_internals import torch_private
from shardwise.units.scripted import is_scripted

_HOOKED = "it has a hook, which a replay would not call"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitKey:
    """The state of a unit. `held`: its modules' classes, attributes, parameters, buffers and modules, in order."""

    held: list[Any]
    others: tuple[Any, ...]

    def equals(self, other: "UnitKey") -> bool:
        """Return whether two states are equal. Values are mostly the same objects, which is quick to find out."""
        if len(self.held) != len(other.held) or self.others != other.others:
            return False
        if all(map(is_, self.held, other.held)):
            return True
        pairs = zip(self.held, other.held, strict=True)
        return all(
            one is two or (isinstance(one, PLAIN) and one == two and type(one) is type(two)) for one, two in pairs
        )


class WatchedUnit:
    """A unit whose calls may be replayed. `why_not`: the reason why they are not, in one line; "" if there is none."""

    def __init__(self, unit: Unit, *, units: Sequence[Unit], recomputes_parts: bool, device: torch.device) -> None:
        self.unit = unit
        self.name = unit.name
        self.module = unit.module
        self.forward: Callable[..., Any] = unit.module.forward
        self.device = device
        self._units = units
        self._recomputes_parts = recomputes_parts
        self.renew()

    def renew(self) -> None:
        """Begin again: the model has changed."""
        self.find_state()
        self.why_not = self._why_never()
        # Whether its forward changes its buffers, once it was observed; and the unit, to compute its forward again.
        self.writes_buffers = False
        self._observed: set[tuple[bool, bool]] = set()
        self.recomputed = RecomputedUnit(self.module, products=None)

    def find_state(self) -> None:
        """Find the parameters and the Python state again."""
        self._state = PythonState(self.module)
        # What a module of torch.jit holds is not Python's; a unit with one in it never becomes a graph.
        modules = self._modules = [module for module in self.module.modules() if not is_scripted(module)]
        self._hooks = [getattr(module, name) for module in modules for name in _HOOKS]
        own = [(module.__dict__, module._parameters, module._buffers, module._modules) for module in modules]
        # In which everything that a module holds by name is found, also what is added.
        self._namespaces = [namespace for namespaces in own for namespace in namespaces]
        places = [(namespace, name) for _, namespace, _, _ in own for name in namespace]
        # Where each parameter is in the modules; one may be in several.
        self._places = [(namespace, name) for namespace, name in places if namespace[name] is not None]
        held = (param for namespace, name in self._places if (param := namespace[name]) is not None)
        self.params: list[nn.Parameter] = list(dict.fromkeys(held))

    def _why_never(self) -> str:
        if any(map(is_scripted, self.module.modules())):
            return "a module of torch.jit is in it"
        own = {id(module) for module in self.module.modules()}
        if any(other is not self.unit and id(other.module) in own for other in self._units):
            return "it contains other units"
        with unguarded():
            if {id(parameter) for parameter in self.module.parameters()} != set(map(id, self.unit.params())):
                return "it shares parameters with another unit"
        if any(_holds_parameters(module) for module in self.module.modules()):
            return "a module of it holds parameters in lists, as nn.GRU does"
        return _HOOKED if foreign_hook(self.module) else ""

    def key(self) -> "UnitKey":
        """Return everything besides its inputs that a call depends on."""
        return UnitKey(
            held=[*map(type, self._modules), *chain.from_iterable(map(dict.values, self._namespaces))],
            others=(
                torch_modes(self.device.type),
                self._state.contents(),
                self._state.addresses(),
                list(map(len, self._hooks)),
                [param.requires_grad for param in self.params],
            ),
        )

    def addresses(self) -> list[int]:
        """Return where the parameters are now: those of a sharded unit are gathered again for each call."""
        return [param.data_ptr() for param in self.params]

    def versions(self) -> list[int]:
        with unguarded():
            return [parameter._version for parameter in self.params]

    @contextmanager
    def with_params(self, others: Sequence[nn.Parameter]) -> Iterator[None]:
        """Let its modules compute with these parameters, in the order of `params`."""
        own = [(namespace, name, namespace[name]) for namespace, name in self._places]
        replaced = {id(param): other for param, other in zip(self.params, others, strict=True)}
        try:
            for namespace, name, param in own:
                namespace[name] = replaced[id(param)]
            yield
        finally:
            for namespace, name, param in own:
                namespace[name] = param

    # Observation of an ordinary call

    @property
    def is_observed(self) -> bool:
        """Whether a call like this one was observed: a pass may leave units out."""
        return (torch.is_grad_enabled(), self.module.training) in self._observed

    def observe(self, call: Callable[[], Any], *, tensors: Sequence[Tensor], graphs: GraphDevice) -> Any:
        """Run an ordinary call and note the reason against replaying it."""
        self._observed.add((torch.is_grad_enabled(), self.module.training))
        self.find_state()
        values, drawn = self._state.values(), graphs.host_generators()
        issued, random_state = _num_collectives(), graphs.random_state()
        own, given = self._state.tensors(), [tensor._version for tensor in tensors]
        before = versions(own)
        with graphs.waits() as waited, noting_reads(self.device.type) as noted:
            result = call()
        after = versions(self._state.tensors())
        replaced = [name for name in before if name not in after or before[name][0] != after[name][0]]
        changed = self._state.changed(values) or (replaced[0] if replaced else "")
        written = [name for name in after if before.get(name) != after[name]]
        self.writes_buffers = self.writes_buffers or bool(written)
        on_host = [name for name in written if own[name].device.type != self.device.type]
        reasons = (
            _HOOKED if foreign_hook(self.module) else "",
            uncounted(own),
            noted.unguarded or (f"{noted.reads[0].place} reads a value from the device" if noted.reads else ""),
            f"{waited[0]} waits for the device" if waited else "",
            "it draws random numbers on the CPU" if graphs.host_generators() != drawn else "",
            f"{changed} changes in Python in each call" if changed else "",
            f"it writes into {on_host[0]}, which is in host memory" if on_host else "",
            "a recomputation of parts of it does not draw all random numbers again"
            if self._recomputes_parts and graphs.random_state() != random_state
            else "",
            "it communicates" if _num_collectives() != issued else "",
            "it writes into its inputs" if [tensor._version for tensor in tensors] != given else "",
        )
        self.why_not = self.why_not or next(filter(None, reasons), "")
        return result


def _holds_parameters(module: nn.Module) -> bool:
    """Return whether it holds parameters besides those that it has by name: it would not compute with others.

    A recurrent layer that finds other parameters even moves them to other memory.
    """
    containers = [value for value in module.__dict__.values() if isinstance(value, list | tuple)]
    return any(isinstance(item, nn.Parameter) for container in containers for item in container)


def _num_collectives() -> list[int]:
    """Return how many collectives were issued, for each process group."""
    if not dist.is_initialized():
        return []
    return [num_collectives(group) for group in torch_private.world.pg_map]
