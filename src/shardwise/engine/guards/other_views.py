"""Refuses a model in which a parameter shares its memory: after `prepare` a view of it would keep the old values.

The parameter moves into a buffer, and a buffer of the model, a tensor on a module or a frozen parameter that shares its
memory does not move with it. Two do (guards/carried.py): another name of a quantised weight, and what torch's old
spectral_norm leaves in the place of a weight until the first forward.

Without it such a view computes with the initial values for the whole training, with no error. Since eb84b76c, and for
two trained parameters in the same memory since 5e135a50 (the first engine).
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.spectral_norm import SpectralNorm

from shardwise.base.errors import InvalidModel
from shardwise.base.torch_internals.torch_private import is_traceable_wrapper_subclass
from shardwise.engine.core.parameters import unguarded
from shardwise.engine.hooks.left_tensors import PLAIN
from shardwise.program.units.scripted import is_scripted, tensor_attributes

# Levels of containers and objects that are searched: a module's attribute → a list of states → a state → its tensors.
_DEPTH = 4
_NOT_SEARCHED = (nn.Module, type, ModuleType, FunctionType, MethodType)
_PLAIN_TYPES = frozenset(PLAIN)
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    """The memory of a tensor: a range of addresses, or on the meta device a range of bytes in its storage."""

    name: str
    tensor: Tensor
    storage: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A tensor that is found on a module or a parameter; `attribute`: its name there, "" if it is deeper inside."""

    name: str
    tensor: Tensor
    holder: nn.Module | nn.Parameter
    attribute: str


def check_views(model: nn.Module) -> None:
    """Refuse a tensor on the model that shares the memory of a parameter without being it.

    Looks once at each parameter and at each attribute of each module, so the time does not depend on their sizes.
    """
    with unguarded():
        parameters = dict(model.named_parameters())
        every = _Memories(parameters)
        for name, buffer in model.named_buffers():
            for parameter in every.shared_with(name, buffer):
                raise _keeps_old_values(name, parameter)
        for name, one in parameters.items():
            if one.requires_grad and one.layout is torch.strided and 0 < _num_places(one) < one.numel():
                raise InvalidModel(f"elements of {name} share memory (expand, as_strided): clone() it before prepare")
            for parameter in every.shared_with(name, one):
                if parameter.tensor.requires_grad:
                    raise _trained_twice(name, parameter, is_frozen=not one.requires_grad)
        for held in _held(model, parameters):
            for parameter in every.shared_with(held.name, held.tensor):
                if not _moves_along(held, parameter.tensor):
                    raise _keeps_old_values(held.name, parameter)


def _trained_twice(name: str, parameter: _Memory, *, is_frozen: bool) -> InvalidModel:
    what = (
        f"{name} is frozen and shares the memory of {parameter.name}, and would no longer follow it after "
        "shardwise.prepare"
        if is_frozen
        else f"{name} and {parameter.name} share memory without being one parameter, and would be trained apart"
    )
    return InvalidModel(f"{what}: assign one nn.Parameter to both places (tied), or clone() one")


def _keeps_old_values(name: str, parameter: _Memory) -> InvalidModel:
    return InvalidModel(
        f"{name} is a view of the parameter {parameter.name}, and would no longer follow it after shardwise.prepare: "
        "compute it in forward or make it a property, or clone() it if it is to keep these values"
    )


class _Memories:
    """The memory of parameters, in order, to find what shares some of it."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        found = [memory for name, one in parameters.items() if (memory := _memory(name, one)) is not None]
        self._sorted = sorted(found, key=lambda one: (one.storage, one.start))
        self._starts = [(one.storage, one.start) for one in self._sorted]
        # The last place up to each of them: beyond it, none before has any.
        self._ends = list(accumulate(((one.storage, one.stop) for one in self._sorted), max))

    def shared_with(self, name: str, tensor: Tensor) -> Iterator[_Memory]:
        """Yield the memories of other tensors that have a place in common with this one."""
        one = _memory(name, tensor)
        if one is None:
            return
        index = bisect_left(self._starts, (one.storage, one.stop)) - 1
        while index >= 0 and self._ends[index] > (one.storage, one.start):
            other = self._sorted[index]
            if other.tensor is not tensor and other.stop > one.start and _have_place_in_common(one, other):
                yield other
            index -= 1


def _memory(name: str, tensor: Tensor) -> _Memory | None:
    """Return the memory of a tensor; None for one that has none of its own."""
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor) or not tensor.numel():
        return None
    storage, start = 0, tensor.data_ptr()
    if tensor.is_meta:
        storage = StorageWeakRef(tensor.untyped_storage()).cdata  # type: ignore[no-untyped-call]
        start = int(tensor.storage_offset()) * tensor.element_size()
    elif not start:
        return None
    stop = start + _num_places(tensor) * tensor.element_size()
    return _Memory(name=name, tensor=tensor, storage=storage, start=start, stop=stop)


def _num_places(tensor: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _have_place_in_common(one: _Memory, other: _Memory) -> bool:
    """Return whether two tensors whose ranges overlap share an element: columns of one matrix may not."""
    dense = all(_num_places(memory.tensor) == memory.tensor.numel() for memory in (one, other))
    if dense or one.tensor.element_size() != other.tensor.element_size():
        return True
    return bool(torch.isin(_places(one), _places(other)).any())


def _places(memory: _Memory) -> Tensor:
    places = torch.tensor(memory.start)
    for size, stride in zip(memory.tensor.shape, memory.tensor.stride(), strict=True):
        places = places[..., None] + torch.arange(size) * (stride * memory.tensor.element_size())
    return places


def _held(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[_Held]:
    """Yield the tensors in attributes of modules and parameters, also in containers and objects, but no parameters."""
    own = {id(parameter) for parameter in parameters.values()}
    seen: set[int] = set()
    for path, holder in [*model.named_modules(), *parameters.items()]:
        attributes = {name: value for name, value in vars(holder).items() if name not in _OF_EVERY_MODULE}
        if is_scripted(holder):
            attributes |= {name: getattr(holder, name) for name in tensor_attributes(holder)}
        for attribute, value in attributes.items():
            name = f"{path}.{attribute}" if path else attribute
            for inner, tensor in _inside(value, name=name, depth=_DEPTH, seen=seen):
                if id(tensor) not in own:
                    yield _Held(
                        name=inner, tensor=tensor, holder=holder, attribute=attribute if tensor is value else ""
                    )


def _inside(value: Any, *, name: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
        return
    if type(value) in _PLAIN_TYPES or isinstance(value, _NOT_SEARCHED) or depth == 0 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        parts = [(f"{name}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple | set | frozenset):
        if _PLAIN_TYPES.issuperset(map(type, value)):
            return
        parts = [(f"{name}[{index}]", item) for index, item in enumerate(value)]
    else:
        parts = [(f"{name}.{key}", item) for key, item in getattr(value, "__dict__", {}).items()]
    for inner, item in parts:
        yield from _inside(item, name=inner, depth=depth - 1, seen=seen)


def _moves_along(held: _Held, parameter: Tensor) -> bool:
    """Return whether a view is another name of the whole parameter that moves with it, or is soon replaced."""
    whole = (parameter.data_ptr(), parameter.shape, parameter.dtype)
    if type(held.tensor) is not Tensor or (held.tensor.data_ptr(), held.tensor.shape, held.tensor.dtype) != whole:
        return False
    if isinstance(held.holder, nn.Module):
        hooks = held.holder._forward_pre_hooks.values()
        if any(isinstance(hook, SpectralNorm) and hook.name == held.attribute for hook in hooks):
            return True
        if not any(parameter is own for own in held.holder._parameters.values()):
            return False
    elif held.holder is not parameter:
        return False
    return type(parameter) is not nn.Parameter and not parameter.requires_grad
