"""Programs whose units count, iterate, log and branch in Python (escaping.py)."""

import itertools
import logging
import warnings
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import torch
from escaping import Block, Net, Prepare, Program, loop
from torch import Tensor

PROGRAMS: dict[str, Program] = {}


def program(train: Program) -> Program:
    PROGRAMS[train.__name__] = train
    return train


def _ramp() -> Iterator[float]:
    for number in itertools.count():
        yield min(1.0, 0.1 + number / 20)


@program
def generator_in_an_attribute(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scales = _ramp()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * next(self.scales))

    return loop(prepare, Net(Own))


@program
def cycle_in_an_attribute(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scales = itertools.cycle([1.0, 0.5, 0.25])

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * next(self.scales))

    return loop(prepare, Net(Own))


@program
def count_in_an_attribute(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = itertools.count(1)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x / next(self.numbers))

    return loop(prepare, Net(Own))


@program
def list_iterator_in_an_attribute(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scales = iter([1 / (1 + number) for number in range(100)])

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * next(self.scales))

    return loop(prepare, Net(Own))


@program
def generator_of_layers(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def steps(self, x: Tensor) -> Iterator[Tensor]:
            for layer in (self.up, torch.tanh, self.down):
                x = layer(x)
                yield x

        def forward(self, x: Tensor) -> Tensor:
            *_, last = self.steps(x)
            return x + last

    return loop(prepare, Net(Own))


@dataclass
class _State:
    scale: float = 1.0
    seen: list[int] = field(default_factory=list)


@program
def dataclass_in_an_attribute(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.state = _State()

        def forward(self, x: Tensor) -> Tensor:
            self.state.seen.append(x.shape[0])
            self.state.scale *= 0.95
            return super().forward(x * self.state.scale)

    return loop(prepare, Net(Own), after=lambda step, net: [len(net.blocks[0].state.seen), net.blocks[0].state.scale])


_Pair = namedtuple("_Pair", "scale shift")


@program
def named_tuple_replaced(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.pair = _Pair(1.0, 0.0)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.pair.scale + self.pair.shift)

    def before(step: int, net: Any) -> None:
        if step == 9:
            net.blocks[1].pair = net.blocks[1].pair._replace(shift=0.5)

    return loop(prepare, Net(Own), before=before, steps=28)


class _Mode(Enum):
    PLAIN = "plain"
    SCALED = "scaled"


@program
def enum_as_state(prepare: Prepare) -> list[Any]:
    class Own(Block):
        mode = _Mode.PLAIN

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 0.5 if self.mode is _Mode.SCALED else x)

    def before(step: int, net: Any) -> None:
        net.blocks[0].mode = _Mode.SCALED if step % 5 == 4 else _Mode.PLAIN

    return loop(prepare, Net(Own), before=before)


@program
def counter_of_a_closure(prepare: Prepare) -> list[Any]:
    calls = 0

    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return super().forward(x * min(1.0, calls / 24))

    return loop(prepare, Net(Own), after=lambda step, net: [calls])


@program
def counter_of_the_class(prepare: Prepare) -> list[Any]:
    class Own(Block):
        calls: ClassVar[int] = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return super().forward(x * min(1.0, self.calls / 24))

    return loop(prepare, Net(Own), after=lambda step, net: [Own.calls])


class _Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


@program
def object_with_slots(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.slots = _Slots()

        def forward(self, x: Tensor) -> Tensor:
            self.slots.scale *= 0.9
            return super().forward(x * self.slots.scale)

    return loop(prepare, Net(Own), after=lambda step, net: [net.blocks[0].slots.scale])


class _Counting(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.num += 1


@program
def log_lines(prepare: Prepare) -> list[Any]:
    logger, counting = logging.getLogger("escaping"), _Counting()
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers = [counting]

    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            logger.info("rows: %s", f"{tuple(x.shape)}")
            return super().forward(x)

    return loop(prepare, Net(Own), after=lambda step, net: [counting.num])


@program
def warnings_in_a_unit(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            warnings.warn("many rows" if x.shape[0] > 5 else "few rows", stacklevel=1)
            return super().forward(x)

    counts = []

    def loss(net: Any, x: Tensor, step: int) -> Tensor:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = net(x).square().mean()
        counts.append(sum(str(one.message).endswith(" rows") for one in caught))
        return found

    return loop(prepare, Net(Own), loss=loss, after=lambda step, net: [counts[-1]])


@program
def text_of_a_shape_as_a_key(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, int] = {}

        def forward(self, x: Tensor) -> Tensor:
            key = f"rows {x.shape[0]}"
            self.seen[key] = self.seen.get(key, 0) + 1
            return super().forward(x / self.seen[key])

    rows = lambda step: 4 + step % 2  # noqa: E731
    return loop(prepare, Net(Own), after=lambda step, net: list(net.blocks[0].seen.values()), rows=rows)


@program
def early_return_by_shape(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x * 0.5 if x.shape[0] > 5 else super().forward(x)

    return loop(prepare, Net(Own), rows=lambda step: 4 + 2 * (step % 2))


@program
def loop_by_size(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            for row in range(x.shape[0]):
                x = x + self.down(self.inner(x[row])) / x.size(0)
            return x

    return loop(prepare, Net(Own), rows=lambda step: 2 + step % 2)


@program
def sorted_modules(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            for name in sorted(self._modules, reverse=True):
                x = torch.tanh(self._modules[name](x))  # type: ignore[misc]
            return x

    return loop(prepare, Net(Own))
