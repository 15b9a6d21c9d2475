"""Checks that the parameters of a prepared model are still those that `prepare` put into buffers.

A parameter that was added later would be trained separately by each rank; one that was moved out of its buffer
(`p.data = …`) would be trained with values that no state dict contains.
"""

import weakref
from collections.abc import Sequence

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.flat_buffers import unguarded
from shardwise.engine.guards.written import Writes
from shardwise.errors import InvalidModel
from shardwise.plan.placement import SHARDED

# Parameters whose address is checked in one forward, all of them in turn; before a state is saved, all are.
_PLACES_PER_FORWARD = 64


class ManagedParameters:
    """The parameters that are in buffers, compared with those that the model has now."""

    def __init__(self, model: nn.Module, *, flats: Sequence[FlatParams]) -> None:
        self._model = model
        self._ids = {id(parameter) for flat in flats for parameter in flat.params}
        # Addresses of replicated parameters. Sharded ones are guarded at rest, so their data cannot be replaced.
        replicated = [flat for flat in flats if flat.placement.params is not SHARDED]
        self._params = [parameter for flat in replicated for parameter in flat.params]
        self._names = [name for flat in replicated for name in flat.names]
        self._pointers = [view.data_ptr() for flat in replicated for view in flat.full_views]
        self._next = 0
        # The model's modules at the last full check; whether anything new was registered since, in any module.
        self._modules: dict[int, weakref.ref[nn.Module]] = {}
        self._is_outdated = True
        self.writes = Writes(flats)
        _MANAGED.add(self)

    def note(self, registered: nn.Module | nn.Parameter | None) -> None:
        """Note a parameter or child that any module of this process has registered, unless the model has it already.

        A slice of a ModuleList, over which many models loop in every forward, registers the model's modules again.
        """
        known = self._modules.get(id(registered))
        if id(registered) not in self._ids and (known is None or known() is not registered):
            self._is_outdated = True

    def check(self, *, thorough: bool) -> None:
        """Refuse a parameter that is new, or no longer in its buffer; take over, or refuse, written values.

        Looks for new parameters only if any module of this process has registered a parameter or child that is not the
        model's since the last time, or with `thorough`.
        """
        if thorough or self._is_outdated:
            self._check_added()
            self._modules = {id(module): weakref.ref(module) for module in self._model.modules()}
            self._is_outdated = False
        self._check_places(thorough=thorough)
        self.writes.settle()

    def _check_places(self, *, thorough: bool) -> None:
        """Check all addresses, or the next few (half a microsecond each)."""
        first, last = (0, len(self._params)) if thorough else (self._next, self._next + _PLACES_PER_FORWARD)
        self._next = last if last < len(self._params) else 0
        with unguarded():
            found = [parameter.data_ptr() for parameter in self._params[first:last]]
        if found != self._pointers[first:last]:
            asked = zip(self._names[first:last], found, self._pointers[first:last], strict=True)
            torn = next(name for name, here, ours in asked if here != ours)
            raise InvalidModel(
                f"{torn} was given other memory after shardwise.prepare (p.data = …, set_, vector_to_parameters, "
                "a cast of its module): write new values with model.load_state_dict"
            )

    def _check_added(self) -> None:
        for name, parameter in self._model.named_parameters():
            if id(parameter) not in self._ids:
                raise InvalidModel(
                    f"{name} {tuple(parameter.shape)} was added to the model after shardwise.prepare, so that ranks "
                    "would train it apart: call shardwise.extend(model) on every rank, or add it before "
                    "shardwise.prepare"
                )


_MANAGED: weakref.WeakSet[ManagedParameters] = weakref.WeakSet()


def _note(module: nn.Module, name: str, registered: nn.Module | nn.Parameter | None) -> None:
    for managed in _MANAGED:
        managed.note(registered)


_HOOKS = (register_module_parameter_registration_hook(_note), register_module_module_registration_hook(_note))
