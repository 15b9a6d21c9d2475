"""What a unit's forward may write without a gradient: a recomputation sees it as the forward did, and leaves no trace.

That is: persistent buffers, attributes of its modules, and lists, dicts, sets and deques in these. What else a forward
writes (a global, a closure, other objects), a recomputation writes again, as torch.utils.checkpoint does.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

# A larger persistent buffer holds weights rather than statistics, and a copy per call would cost as much memory as
# recomputation saves. A larger list is a table that is read.
_MOST_BUFFER_BYTES = 2**20
_MOST_ENTRIES = 10_000

Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
# Containers, and what they hold, by their ids.
_Contents = dict[int, tuple[Container, dict[Any, Any] | list[Any]]]
_OF_TORCH = nn.Module().__dict__.keys()


class UnitState:
    """The state of a unit's modules when a forward begins."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._places: list[Container] = [module._buffers for module in modules if module._buffers]
        self._attributes: list[Container] = [
            module.__dict__ for module in modules if not type(module).__module__.startswith("torch.nn.")
        ]
        self._before = {key: (held, _bare(copy)) for key, (held, copy) in _contents(self._attributes).items()}
        # The namespace of a buffer, its name there, its value.
        self._buffers = [
            (module._buffers, name, buffer.clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
            and name not in module._non_persistent_buffers_set
            and buffer.nbytes <= _MOST_BUFFER_BYTES
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have the modules as they were, and afterwards as they are now."""
        # What was replaced since may be held by the user.
        replaced = [held for held, _ in self._before.values()]
        now = _contents([*self._attributes, *self._places, *replaced])
        _put(self._before)
        for place, name, value in self._buffers:
            # Copies, because there may be another recomputation.
            place[name] = value.clone()
        try:
            yield
        finally:
            _put(now)


def _contents(places: Sequence[Container]) -> _Contents:
    """Return the contents of containers, and of those that are found there."""
    found: _Contents = {}
    left = list(places)
    while left:
        held = left.pop()
        if id(held) in found or len(held) > _MOST_ENTRIES:
            continue
        found[id(held)] = (held, dict(held) if isinstance(held, dict) else list(held))
        values = [held[name] for name in held.keys() - _OF_TORCH] if isinstance(held, dict) else held
        left += [value for value in values if isinstance(value, dict | list | set | deque)]
    return found


def _bare(copy: dict[Any, Any] | list[Any]) -> dict[Any, Any] | list[Any]:
    """Return contents without the graphs of the forwards that have made them, which would be kept alive."""
    if isinstance(copy, dict):
        return {name: _without_graph(value) for name, value in copy.items()}
    return [_without_graph(value) for value in copy]


def _without_graph(value: Any) -> Any:
    has_graph = type(value) is Tensor and value.grad_fn is not None
    return value.detach().requires_grad_() if has_graph else value


def _put(contents: _Contents) -> None:
    for held, before in contents.values():
        if isinstance(held, dict) and isinstance(before, dict):
            if held.keys() != before.keys() or any(held[name] is not value for name, value in before.items()):
                held.clear()
                held.update(before)
        elif len(held) != len(before) or any(one is not other for one, other in zip(held, before, strict=True)):
            held.clear()
            held.update(before) if isinstance(held, set) else held.extend(before)  # type: ignore[union-attr]
