"""Python state that a step depends on or changes.

A replay runs no Python. So a value that Python reads (`self.training`, `p` of a dropout, a variable of the closure) is
part of a graph's key; and a step that changes one (a counter, a list that grows), or draws a random number on the CPU
(layerdrop), cannot be captured. Tensors that a step writes (statistics of a BatchNorm) are found by their version
counters; they are restored before a step runs again.
"""

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
_COUNTED = (list, dict, set)
# Of larger containers only the size is compared.
_MOST_COMPARED = 64
# Attributes of nn.Module itself; its only plain value is `training`.
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training"}

# Hooks of these packages only compute, so that a replay does their work too.
_QUIET_PACKAGES = ("torch", "shardwise", "transformers")

Values = tuple[Any, ...]


class PythonState:
    """The plain values and the tensors that a model, and functions that are called with it, can reach by name."""

    def __init__(self, model: nn.Module, *, functions: Sequence[Callable[..., Any]] = ()) -> None:
        self._model = model
        self._functions = functions
        self._places: list[_Place] = []
        self.find_places()

    def find_places(self) -> None:
        """Find the places again: modules may have new attributes."""
        self._places = list(_places_of_module(self._model, "model"))
        seen = {id(self._model)}
        for function in self._functions:
            self._places += _places_of_function(function, seen)
        self._with_tensors = [place for place in self._places if place.with_tensors]

    def values(self) -> Values:
        """Return all plain values as they are now, in a form that can be compared."""
        return tuple(place.values() for place in self._places)

    def changed(self, before: Values) -> str:
        """Return the name of a value that differs from `before`; "" if none does."""
        for place, old in zip(self._places, before, strict=True):
            if place.values() != old:
                return place.difference(old)
        return ""

    def addresses(self) -> Values:
        """Return the addresses of the tensors."""
        return tuple(tensor.data_ptr() for place in self._with_tensors for _, tensor in place.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """Return, by name, buffers and tensors that are attributes or in closures; no parameters."""
        return {name: tensor for place in self._with_tensors for name, tensor in place.tensors()}


class _Place:
    """A namespace, and the keys that have plain values, containers or tensors in it."""

    def __init__(self, name: str, namespace: dict[str, Any], keys: Sequence[str], *, closed: bool = True) -> None:
        self.name = name
        self.namespace = namespace
        # Whether a new key is a change.
        self.closed = closed
        self.keys = sorted(key for key in keys if isinstance(namespace[key], PLAIN))
        self.counted = sorted(key for key in keys if isinstance(namespace[key], _COUNTED))
        self.with_tensors = sorted(key for key in keys if isinstance(namespace[key], Tensor))
        self._get = itemgetter(*self.keys) if self.keys else None

    def values(self) -> Values:
        namespace = self.namespace
        try:
            plain = self._get(namespace) if self._get is not None else None
            counts = self.contents() if self.counted else []
        except (KeyError, TypeError):
            # A key is gone, or has a value of another kind.
            return (None, None, None)
        return (plain, counts, len(namespace) if self.closed else 0)

    def contents(self) -> list[Any]:
        return [_content(self.namespace[key]) for key in self.counted]

    def difference(self, old: Values) -> str:
        now = self.values()
        if now[0] != old[0] and now[0] is not None and old[0] is not None:
            pairs = zip(self.keys, _as_tuple(now[0], self.keys), _as_tuple(old[0], self.keys), strict=True)
            return next((f"{self.name}.{key}" for key, new, before in pairs if new != before), self.name)
        if now[1] != old[1] and now[1] is not None and old[1] is not None:
            counts = zip(self.counted, now[1], old[1], strict=True)
            return next((f"{self.name}.{key}" for key, new, before in counts if new != before), self.name)
        return self.name

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for key in self.with_tensors:
            value = self.namespace.get(key)
            if isinstance(value, Tensor):
                yield f"{self.name}.{key}", value


def _content(container: Any) -> Any:
    """Return the plain values in a container, and how many others it has."""
    if len(container) > _MOST_COMPARED:
        return len(container)
    items = container.items() if isinstance(container, dict) else container
    return [item if _is_plain(item) else None for item in items]


def _is_plain(item: Any) -> bool:
    return isinstance(item, PLAIN) or (isinstance(item, tuple) and all(isinstance(part, PLAIN) for part in item))


def _as_tuple(values: Any, keys: Sequence[str]) -> tuple[Any, ...]:
    """Return the values of an itemgetter, which does not make a tuple of a single one."""
    return values if len(keys) > 1 else (values,)


def _places_of_module(module: nn.Module, name: str) -> Iterator[_Place]:
    for path, inner in module.named_modules():
        full = f"{name}.{path}" if path else name
        own = inner.__dict__
        yield _Place(full, own, [key for key in own if key not in _OF_EVERY_MODULE])
        if inner._buffers:
            yield _Place(full, inner._buffers, list(inner._buffers))


def _places_of_function(function: Any, seen: set[int]) -> Iterator[_Place]:
    """Yield the closure and the globals that a function's code names, and those of functions in its closure."""
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        yield from _places_of_function(function.func, seen)
    elif isinstance(function, MethodType):
        yield from _places_of_function(function.__func__, seen)
    elif isinstance(function, nn.Module):
        yield from _places_of_module(function, type(function).__name__)
    elif isinstance(function, FunctionType):
        code = function.__code__
        cells = _Cells(zip(code.co_freevars, function.__closure__ or (), strict=True))
        yield _Place(function.__name__, cells, list(cells), closed=False)
        used = [key for key in code.co_names if key in function.__globals__]
        yield _Place(function.__module__, function.__globals__, used, closed=False)
        for value in cells.values():
            if isinstance(value, FunctionType | MethodType | functools.partial | nn.Module):
                yield from _places_of_function(value, seen)


class _Cells(dict[str, Any]):
    """The current variables of a closure by name."""

    def __init__(self, cells: Iterable[tuple[str, Any]]) -> None:
        self._cells = dict(cells)
        super().__init__({name: None for name in self._cells if self._is_set(name)})

    def _is_set(self, name: str) -> bool:
        try:
            self._cells[name].cell_contents  # noqa: B018 - an empty cell raises
        except ValueError:
            return False
        return True

    def __getitem__(self, name: str) -> Any:
        return self._cells[name].cell_contents

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except (KeyError, ValueError):
            return default

    def values(self) -> Any:
        return [self[name] for name in self]


def foreign_hook(model: nn.Module) -> str:
    """Return a module that has a user's hook, which a replay would not call; "" if there is none."""
    for path, module in model.named_modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            for hook in getattr(module, name).values():
                inner = hook.func if isinstance(hook, functools.partial) else hook
                package = str(getattr(inner, "__module__", "")).partition(".")[0]
                if package not in _QUIET_PACKAGES:
                    return f"model.{path}" if path else "model"
    return ""


def generators() -> tuple[Any, ...]:
    """Return the states of the CPU's random generators: torch's, Python's and numpy's."""
    name, keys, position, *_ = np.random.get_state(legacy=True)
    return (
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        (name, np.asarray(keys).tobytes(), position),
    )
