"""Parts that read or write state in Python, take and return containers, or have an autograd.Function of their own; hooks.

State that a forward writes belongs to one rank (`memory_of`). A setting is changed by an event, on all ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class Gated(nn.Module):
    """Its gate is used or not, as Python decides."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.gate = nn.Parameter(torch.full((width,), 0.5))

    def scaled(self, x: Tensor, factor: float) -> Tensor:
        if factor:
            x = x * self.gate
        return x + (1 + factor) * torch.tanh(self.up(x))


class Attribute(Gated):
    factor = 1.0

    def set(self, factor: float) -> None:
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, self.factor)


class Entry(Gated):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.options = {"factor": 1.0}

    def set(self, factor: float) -> None:
        self.options["factor"] = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, self.options["factor"])


class Configured(Gated):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.config = SimpleNamespace(factor=1.0)

    def set(self, factor: float) -> None:
        self.config.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, self.config.factor)


class Closed(Gated):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        factor = 1.0

        def write(value: float) -> None:
            nonlocal factor
            factor = value

        self.read, self.set = lambda: factor, write

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, self.read())


_FACTOR = 1.0


class Global(Gated):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.set(1.0)

    def set(self, factor: float) -> None:
        global _FACTOR
        _FACTOR = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, _FACTOR)


class Counting(Gated):
    """Uses its gate in every other call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.scaled(x, float(self.calls % 2))


class CountingElsewhere(Gated):
    """Like Counting; the count is that of `read` and `write`."""

    read: Callable[[], int]
    write: Callable[[int], None]

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.read() + 1)
        return self.scaled(x, float(self.read() % 2))


class CountingClosed(CountingElsewhere):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        calls = 0

        def write(value: int) -> None:
            nonlocal calls
            calls = value

        self.read, self.write = lambda: calls, write


class CountingConfigured(CountingElsewhere):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.config = SimpleNamespace(calls=0)

    def read(self) -> int:
        return int(self.config.calls)

    def write(self, value: int) -> None:
        self.config.calls = value


_CALLS = 0


class CountingGlobally(CountingElsewhere):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.write(0)

    def read(self) -> int:
        return _CALLS

    def write(self, value: int) -> None:
        global _CALLS
        _CALLS = value


class Remembering(Gated):
    """Keeps a mean under a name."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.memory: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        found = self.scaled(x - self.memory["mean"] if "mean" in self.memory else x, 0.5)
        self.memory["mean"] = x.detach().mean((0, 1))
        return found


class Queueing(Gated):
    """Keeps the means of the last two calls."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.queue: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        found = self.scaled(x + sum(self.queue) / 10, 0.5)
        self.queue.append(found.detach().mean((0, 1)))
        if len(self.queue) > 2:
            del self.queue[0]
        return found


class Penalised(Gated):
    """Gives a part of the loss to a list."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        found = self.scaled(x, 0.5)
        self.losses.append(found.square().mean())
        return found


class Listed(Gated):
    def forward(self, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        left, right = tensors
        return self.scaled(left, 0.5), torch.tanh(right)


class Keyed(Gated):
    def forward(self, tensors: dict[str, Any]) -> dict[str, Any]:
        left, (right,) = tensors["pair"]
        return {"hidden": self.scaled(tensors["hidden"], 0.5), "others": [left * right, right]}


class Exp(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp() - 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 0.5 * grad * ctx.saved_tensors[0].exp()


class OwnFunction(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x + Exp.apply(torch.tanh(x)), 0.5)


SETTINGS: dict[str, type[Gated]] = {
    "attribute": Attribute,
    "entry": Entry,
    "config": Configured,
    "closure": Closed,
    "global": Global,
}
WRITING: dict[str, type[Gated]] = {
    "counting": Counting,
    "remembering": Remembering,
    "queueing": Queueing,
    "penalised": Penalised,
}
# They write where a recomputation of the plan does not restore what was there, as docs/engine.md says.
ELSEWHERE: dict[str, type[Gated]] = {
    "counting closure": CountingClosed,
    "counting config": CountingConfigured,
    "counting global": CountingGlobally,
}
OTHERS: dict[str, type[Gated]] = {"listed": Listed, "keyed": Keyed, "own function": OwnFunction}
FACTORS = (0.5, 0.0, 2.0)
_MEMORY = ("calls", "memory", "queue", "looked")


def memory_of(parts: nn.ModuleList) -> list[dict[str, Any]]:
    """Return a copy of what the forwards of parts have written."""
    found = [{name: part.__dict__[name] for name in _MEMORY if name in part.__dict__} for part in parts]
    for part, its in zip(parts, found, strict=True):
        if isinstance(part, CountingElsewhere):
            its["elsewhere"] = part.read()
    return tree_map_only(Tensor, Tensor.clone, found)


def remember(parts: nn.ModuleList, memory: list[dict[str, Any]]) -> None:
    """Give parts what `memory_of` has returned, and nothing else."""
    for part, found in zip(parts, tree_map_only(Tensor, Tensor.clone, memory), strict=True):
        for name in _MEMORY:
            part.__dict__.pop(name, None)
        if "elsewhere" in found:
            part.write(found.pop("elsewhere"))
        part.__dict__.update(found)


def _look(inner: nn.Module, part: nn.Module) -> Any:
    def look(module: nn.Module, given: Any, found: Tensor) -> None:
        part.__dict__["looked"] = found.detach().mean()

    return inner.register_forward_hook(look)


# How → registers a hook on an inner module of a part.
HOOKS: dict[str, Callable[[nn.Module, nn.Module], Any]] = {
    "look": _look,
    "input": lambda inner, part: inner.register_forward_pre_hook(lambda module, given: (0.5 * given[0],)),
    "result": lambda inner, part: inner.register_forward_hook(lambda module, given, found: 0.5 * found),
    "gradient": lambda inner, part: inner.register_full_backward_hook(
        lambda module, into, out: tuple(None if grad is None else 0.5 * grad for grad in into)
    ),
}


def hook(part: nn.Module, how: str) -> None:
    """Register a hook on the first layer of a part that has one input and one result; "remove": remove all of them."""
    handles = part.__dict__.setdefault("handles", [])
    if how == "remove":
        while handles:
            handles.pop().remove()
        return
    layers = [module for module in part.modules() if isinstance(module, nn.Linear | nn.Conv1d | nn.LayerNorm)]
    if layers:
        handles.append(HOOKS[how](layers[0], part))


class Interrupted(Exception):  # noqa: N818 - raised and caught by the user's code
    pass


@contextmanager
def interrupted(module: nn.Module) -> Iterator[None]:
    """Have calls of a module fail."""

    def fail(module: nn.Module, given: Any) -> None:
        raise Interrupted

    handle = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()
