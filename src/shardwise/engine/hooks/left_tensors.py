"""The tensors that a forward leaves behind: in its output, and on its modules (an auxiliary loss).

They are looked for after every forward of every unit, so the usual case, that modules keep none, is fast.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.program.units.scripted import is_scripted, tensor_attributes

PLAIN = (int, float, complex, bool, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
_PLAIN_TYPES = frozenset(PLAIN)
_CONTAINERS = (list, tuple, dict)
# The keys and values that a language model of transformers returns unless `use_cache` is off.
_KV_CACHE = ("transformers.cache_utils", "Cache")
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


def own_modules(module: nn.Module, *, unit_modules: set[int]) -> Iterator[nn.Module]:
    """Yield a unit's modules that are not torch's, which may keep a tensor on themselves (an auxiliary loss)."""
    waiting = [module]
    while waiting:
        module = waiting.pop()
        if not type(module).__module__.startswith("torch.nn."):
            yield module
        waiting += [child for child in module.children() if id(child) not in unit_modules]


class Attributes:
    """The attributes of a module, without those of nn.Module.

    values      returns them from the module's __dict__, `held`, as a tuple
    num_held    the length of `held` when `values` was made
    harmless    types whose values are no tensors and hold none that count
    """

    __slots__ = ("harmless", "held", "module", "num_held", "values")

    def __init__(self, module: nn.Module) -> None:
        self.held = module.__dict__
        self.module = module
        self.values: Callable[[dict[str, Any]], tuple[Any, ...]]
        self.learn()

    def learn(self) -> None:
        self.num_held = len(self.held)
        if is_scripted(self.module):
            self._learn_scripted(tensor_attributes(self.module))
            return
        names = [name for name in self.held if name not in _OF_EVERY_MODULE]
        # Two that every module has, also one of torch.compile: with fewer than two, an itemgetter returns no tuple.
        self.values = itemgetter("_is_full_backward_hook", "_is_full_backward_hook", *names)
        types = map(type, self.values(self.held))
        self.harmless = _PLAIN_TYPES.union(one for one in types if not issubclass(one, (Tensor, *_CONTAINERS)))

    def _learn_scripted(self, names: list[str]) -> None:
        self.values = lambda held: tuple(getattr(self.module, name) for name in names)
        self.harmless = _PLAIN_TYPES


def kept(attributes: list[Attributes]) -> list[Any]:
    """Return the attributes of modules that may be tensors, also those in lists, tuples and dicts."""
    found: list[Any] = []
    for of_module in attributes:
        held = of_module.held
        if len(held) != of_module.num_held:
            of_module.learn()
        try:
            values = of_module.values(held)
        except KeyError:
            of_module.learn()
            values = of_module.values(held)
        if of_module.harmless.issuperset(map(type, values)):
            continue
        for value in values:
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, _CONTAINERS) and not _is_plain(value):
                found += leaves(value)
    return found


def _is_plain(container: Any) -> bool:
    """Return whether a list, tuple or dict holds only numbers, strings and the like, at any depth."""
    values = container.values() if isinstance(container, dict) else container
    return _PLAIN_TYPES.issuperset(map(type, values)) or all(
        type(value) in _PLAIN_TYPES or (isinstance(value, _CONTAINERS) and _is_plain(value)) for value in values
    )


def leaves(output: Any) -> list[Any]:
    """Return the leaves of an output, also those in dataclasses and caches, into which torch's trees do not look."""
    if isinstance(output, Tensor):
        return [output]
    return [inner for leaf in tree_leaves(output) for inner in _inside(leaf)]


def _inside(leaf: Any) -> list[Any]:
    if isinstance(leaf, (Tensor, type)) or type(leaf) in _PLAIN_TYPES:
        return [leaf]
    if is_dataclass(leaf):
        return [part for field in fields(leaf) for part in leaves(getattr(leaf, field.name))]
    if any((base.__module__, base.__name__) == _KV_CACHE for base in type(leaf).__mro__):
        # Its layers may be empty, without tensors yet.
        return [getattr(layer, name, None) for layer in getattr(leaf, "layers", ()) for name in ("keys", "values")]
    return [leaf]
