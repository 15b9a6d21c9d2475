"""Checks that the parameters of a prepared model are still those that `prepare` put into buffers.

A parameter that was added later would be trained separately by each rank. One that was moved out of its buffer
(`p.data = …`, as momentum encoders do it) computes with its new memory until the next update, or until values are read:
then its values are copied into the buffer, and it is put back there.

Without it ranks train an added parameter apart, and updates do not reach a moved one: models that differ, and no error.
Since ec7b352d (the first engine).
"""

import weakref
from collections.abc import Sequence

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from shardwise.base.errors import InvalidModel
from shardwise.base.vocabulary.while_alive import WhileAlive, hooked
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.parameters import unguarded
from shardwise.engine.guards.written import Writes

# Parameters whose address is checked in one forward, all of them in turn; before an update or a state, all are.
_PLACES_PER_FORWARD = 64


class ManagedParameters:
    """The parameters that are in buffers, compared with those that the model has now."""

    def __init__(self, model: nn.Module, *, flats: Sequence[FlatParams]) -> None:
        self._model = model
        self._ids = {id(parameter) for flat in flats for parameter in flat.params}
        # Addresses of replicated parameters. Sharded ones are guarded at rest, so their data cannot be replaced.
        replicated = [flat for flat in flats if not flat.placement.params.is_sharded]
        self._params = [parameter for flat in replicated for parameter in flat.params]
        self._places = [(flat, index) for flat in replicated for index in range(len(flat.params))]
        self._pointers = [view.data_ptr() for flat in replicated for view in flat.full.views]
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
        first, last = (0, len(self._params)) if thorough else (self._next, self._next + _PLACES_PER_FORWARD)
        self._next = last if last < len(self._params) else 0
        for place in self._moved(first, last):
            _check_fits(*place)
        self.writes.settle()

    def settle(self, *, announced: bool = False) -> None:
        """Before values are read: update all copies of written values, or refuse the write (written.py).

        A trained parameter that was moved is refused: its old values may be put aside (`kept = p.data`), to come back.
        """
        self.put_back(trained=False)
        self.writes.settle(announced=announced)

    def put_back(self, *, trained: bool = True) -> None:
        """Copy the values of moved parameters into their buffers and make these the parameters' memory again."""
        memory: list[tuple[str, StorageWeakRef]] = []
        for flat, index in self._moved(0, len(self._params)):
            _check_fits(flat, index)
            parameter, name = flat.params[index], flat.names[index]
            if parameter.requires_grad and not trained:
                raise InvalidModel(
                    f"{name} was given other memory after shardwise.prepare (p.data = …, set_, vector_to_parameters), "
                    "which the next optimizer.step() copies: do this after it, or write p.data.copy_(…)"
                )
            flat.full.wait()
            with torch.no_grad(), unguarded():
                memory.append((name, StorageWeakRef(parameter.untyped_storage())))  # type: ignore[no-untyped-call]
                flat.full.views[index].copy_(parameter)
                parameter.data = flat.full.views[index]
            flat.master.writes.touch()
        for name, storage in memory:
            if not storage.expired():  # type: ignore[no-untyped-call]
                raise InvalidModel(
                    f"{name} was given the memory of a tensor that is still in use (p.data = tensor), and later writes "
                    "to that tensor would not reach it: write p.data.copy_(tensor)"
                )

    def _moved(self, first: int, last: int) -> list[tuple[FlatParams, int]]:
        """Return the places of parameters that have other memory (half a microsecond each)."""
        with unguarded():
            found = [parameter.data_ptr() for parameter in self._params[first:last]]
        if found == self._pointers[first:last]:
            return []
        asked = zip(self._places[first:last], found, self._pointers[first:last], strict=True)
        return [place for place, here, ours in asked if here != ours]

    def _check_added(self) -> None:
        for name, parameter in self._model.named_parameters():
            # torch.func.functional_call lends modules plain tensors for one call; they are not the model's to train.
            if id(parameter) not in self._ids and isinstance(parameter, nn.Parameter):
                raise InvalidModel(
                    f"{name} {tuple(parameter.shape)} was added to the model after shardwise.prepare, so that ranks "
                    "would train it apart: call shardwise.extend(model) on every rank, or add it before "
                    "shardwise.prepare"
                )


def _check_fits(flat: FlatParams, index: int) -> None:
    """Refuse other memory that cannot be copied into the buffer as it is."""
    parameter, view = flat.params[index], flat.full.views[index]
    if (parameter.shape, parameter.dtype, parameter.device) != (view.shape, view.dtype, view.device):
        raise InvalidModel(
            f"{flat.names[index]} was given other memory after shardwise.prepare (a cast of its module, p.data = …): "
            f"{parameter.dtype} {tuple(parameter.shape)} on {parameter.device} in place of {view.dtype} "
            f"{tuple(view.shape)} on {view.device}"
        )


def _note(module: nn.Module, name: str, registered: nn.Module | nn.Parameter | None) -> None:
    for managed in _MANAGED:
        managed.note(registered)


_MANAGED: WhileAlive[ManagedParameters] = WhileAlive(
    hooked(register_module_parameter_registration_hook, _note), hooked(register_module_module_registration_hook, _note)
)
