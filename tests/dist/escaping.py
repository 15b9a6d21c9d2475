"""Programs in which something enters or leaves a unit other than by its arguments and its result, and how they end.

Each program is a function `train(prepare)`: it makes a model and an optimizer, hands both to `prepare`, trains, and
returns all that it has seen. It runs twice: with plain torch, and prepared, on simulated graphs.

escaping_state.py      state that units keep in Python: attributes, lists, dicts, buffers
escaping_settings.py   settings that they read from outside: closures, globals, classes, config objects
escaping_random.py     random numbers
escaping_arguments.py  what they are given
escaping_results.py    what they return
escaping_hooks.py      hooks and autograd.Functions
escaping_torch.py      modes of torch, checkpoints, errors in between
escaping_python.py     counters, iterators, log lines, control flow
escaping_lookups.py    attributes, keys and references that change or come later
escaping_tensors.py    tensors of unusual kinds
escaping_functions.py  transformed functions and weights, torch's modes inside
"""

import random
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from simulated_graphs import simulated
from torch import Tensor, nn

import shardwise
from shardwise.engine.engine import engine_of
from shardwise.plan import Plan

Prepare = Callable[..., Any]
Program = Callable[[Prepare], list[Any]]

_SECONDS = 60


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 16), nn.Linear(16, width)

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x))

    def forward(self, x: Tensor) -> Any:
        return x + self.down(self.inner(x))


class Normed(Block):
    """A block that writes buffers: statistics of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Any:
        return super().forward(self.norm(x))


class Net(nn.Module):
    """Blocks of one class; a program may say how they are called."""

    def __init__(self, block: Callable[[], nn.Module] = Block, *, run: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(8, 1)
        self.run = run

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = self.first(x)
        if self.run is not None:
            return self.head(self.run(self.blocks, x, **options))
        for block in self.blocks:
            x = block(x, **options)
        return self.head(x)


def batches(num: int, *, rows: Callable[[int], int]) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(rows(step), 8, generator=generator) for step in range(num))


def loop(
    prepare: Prepare,
    net: nn.Module,
    *,
    loss: Callable[[Any, Tensor, int], Tensor] = lambda net, x, step: net(x).square().mean(),
    before: Callable[[int, Any], None] = lambda step, net: None,
    after: Callable[[int, Any], Iterable[Any]] = lambda step, net: (),
    steps: int = 16,
    rows: Callable[[int], int] = lambda step: 4,
    **plan: Any,
) -> list[Any]:
    """Train; return the losses, what `after` returns, and the weights and buffers at the end."""
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    net, optimizer = prepare(net, torch.optim.AdamW(trained, lr=1e-2), **plan)
    seen: list[Any] = []
    for step, x in enumerate(batches(steps, rows=rows)):
        before(step, net)
        found = loss(net, x, step)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [found.detach(), *after(step, net)]
    return [*seen, *net.state_dict().values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a program ended: equal, rounding, different, crash or "both raise"; calls of units, and replays of them."""

    verdict: str
    why: str = ""
    num_calls: int = 0
    num_replayed: int = 0
    reasons: tuple[str, ...] = ()

    @property
    def replays(self) -> bool:
        """Whether most calls of units were replays."""
        return self.num_replayed > self.num_calls / 2


def ending(program: Program, *, strategy: str = "fsdp", graphs: bool = True) -> Ending:
    """Run a program with plain torch and prepared, and compare."""
    models: list[Any] = []

    def prepare(model: nn.Module, optimizer: Any, **plan: Any) -> Any:
        keys = {"strategy": strategy, "capture": "auto" if graphs else "off", **plan}
        models.append(model)
        return shardwise.prepare(model, optimizer, Plan(**keys), watch_seconds=0.0)

    expected = _outcome(program, lambda model, optimizer, **plan: (model, optimizer))
    with simulated(at_once=True, moved=0.0) if graphs else nullcontext([]):
        found = _outcome(program, prepare)
    units = [one for model in models if (one := engine_of(model).graphs) is not None]
    verdict, why = _compared(expected, found)
    return Ending(
        verdict=verdict,
        why=why,
        num_calls=sum(one.num_calls for one in units),
        num_replayed=sum(one.num_replayed for one in units),
        reasons=tuple(sorted({why for one in units for unit in one.units if (why := unit.reason())})),
    )


def _outcome(program: Program, prepare: Prepare) -> list[Any] | Exception:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    try:
        with _limit():
            found = program(prepare)
    except Exception as error:
        return error
    return [torch.as_tensor(value).detach().clone() for value in found]


@contextmanager
def _limit() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"not over after {_SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _compared(expected: Any, found: Any) -> tuple[str, str]:
    if isinstance(expected, Exception):
        return ("both raise", "") if isinstance(found, Exception) else ("different", f"torch raises {expected}")
    if isinstance(found, Exception):
        return "crash", f"{type(found).__name__}: {found}"[:300]
    if len(expected) != len(found):
        return "different", f"{len(found)} values instead of {len(expected)}"
    verdict = "equal"
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one.shape != other.shape or not torch.allclose(
            one.double(), other.double(), rtol=1e-5, atol=1e-6, equal_nan=True
        ):
            return "different", f"value {number} of {len(expected)}: {one.flatten()[:2]} and {other.flatten()[:2]}"
        verdict = verdict if torch.equal(one, other) else "rounding"
    return verdict, ""
