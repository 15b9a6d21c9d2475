"""The form of a call: what must be equal for a recorded call to be replayed."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor

from shardwise.engine.core.inference_tensors import normal
from shardwise.engine.graphs.python_state import PLAIN
from shardwise.engine.graphs.reads import NotCaptured

_CONTAINERS = (tuple, list, dict)

Leaf = TypeVar("Leaf")


def form_of(value: Any, tensors: list[Tensor]) -> Any:
    """Return the form of a value in a way that can be compared, and append its tensors to `tensors`.

    A tensor that occurs twice has the number of its first place as its form, because a forward may ask whether two
    inputs are the same object. Raises NotCaptured for a value in which no tensors are found.
    """
    kind = type(value)
    if kind is Tensor:
        for number, other in enumerate(tensors):
            if other is value:
                return number
        tensors.append(value)
        return (value.shape, value.stride(), value.dtype, value.requires_grad)
    if kind is dict:
        return (dict, tuple(value), *[form_of(item, tensors) for item in value.values()])
    if kind in _CONTAINERS:
        return (kind, *[form_of(item, tensors) for item in value])
    if isinstance(value, PLAIN):
        # With its type, because True == 1 == 1.0, and a forward may tell them apart.
        return (kind, value)
    raise NotCaptured(f"it is given a {kind.__name__}")


def mapped(value: Any, kind: type[Leaf], replace: Callable[[Leaf], Any]) -> Any:
    """Return a copy of a value of which `form_of` knows the form, with its leaves of one type replaced."""
    found = type(value)
    if found is kind:
        return replace(value)
    if found is dict:
        return {key: mapped(item, kind, replace) for key, item in value.items()}
    if found in _CONTAINERS:
        return found(mapped(item, kind, replace) for item in value)
    return value


def with_normal(call: tuple[Any, Any], tensors: list[Tensor]) -> tuple[tuple[Any, Any], list[Tensor]]:
    """Return a call and its tensors with normal tensors in place of inference tensors. Raises NotCaptured."""
    inference = [tensor for tensor in tensors if tensor.is_inference()]
    if not inference:
        return call, tensors
    if any(tensor.requires_grad or tensor.is_conj() or tensor.is_neg() for tensor in inference):
        raise NotCaptured("it is given an inference tensor that is more than its memory")
    found = {id(tensor): normal(tensor) for tensor in tensors}
    return mapped(call, Tensor, lambda tensor: found[id(tensor)]), list(found.values())


def shapes_of(value: Any) -> Iterator[Any]:
    """Yield the shapes of the tensors in a model's inputs, and their dtypes; other objects by their type."""
    if isinstance(value, Tensor):
        yield (value.shape, value.dtype)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from shapes_of(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from shapes_of(item)
    else:
        yield type(value)
