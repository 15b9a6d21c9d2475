"""Programs whose units read settings from outside: closures, globals, classes, config objects (escaping.py)."""

import functools
import threading
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
from escaping import Block, Net, Prepare, Program, loop
from torch import Tensor

PROGRAMS: dict[str, Program] = {}


def program(train: Program) -> Program:
    PROGRAMS[train.__name__] = train
    return train


@program
def closure_temperature(prepare: Prepare) -> list[Any]:
    temperature = 1.0

    def scaled(x: Tensor) -> Tensor:
        return x / temperature

    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(scaled(x))

    def before(step: int, net: Any) -> None:
        nonlocal temperature
        temperature = 1.0 if step < 11 else 2.0

    return loop(prepare, Net(Own), before=before)


_SETTINGS = {"scale": 1.0}
_SCALE = 1.0


@program
def global_number(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * _SCALE)

    def before(step: int, net: Any) -> None:
        global _SCALE
        _SCALE = 1.0 if step < 9 else 0.7

    try:
        return loop(prepare, Net(Own), before=before)
    finally:
        before(0, None)


@program
def global_dict(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * _SETTINGS["scale"])

    try:
        return loop(prepare, Net(Own), before=lambda step, net: _SETTINGS.update(scale=1.0 + step / 10))
    finally:
        _SETTINGS["scale"] = 1.0


@program
def config_object(prepare: Prepare) -> list[Any]:
    config = SimpleNamespace(act="tanh", scale=1.0)

    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.config = config

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x) * self.config.scale
            return x + self.down(torch.tanh(hidden) if self.config.act == "tanh" else torch.relu(hidden))

    def before(step: int, net: Any) -> None:
        config.act = "tanh" if step < 8 else "relu"

    return loop(prepare, Net(Own), before=before)


@program
def config_swapped_for_another(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(scale=1.0)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.config.scale)

    def before(step: int, net: Any) -> None:
        if step == 9:
            net.blocks[0].config = SimpleNamespace(scale=0.5)

    return loop(prepare, Net(Own), before=before)


@program
def class_attribute(prepare: Prepare) -> list[Any]:
    class Own(Block):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale)

    return loop(prepare, Net(Own), before=lambda step, net: setattr(Own, "scale", 1.0 if step < 9 else 0.3))


@program
def back_reference_to_the_model(prepare: Prepare) -> list[Any]:
    class Own(Block):
        owner: Any = ()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.owner[0].gain)

    net: Any = Net(Own)
    net.gain = 1.0
    for block in net.blocks:
        block.owner = (net,)
    return loop(prepare, net, before=lambda step, net: setattr(net, "gain", 1.0 if step < 10 else 0.8))


@program
def set_of_names(prepare: Prepare) -> list[Any]:
    enabled: set[str] = set()

    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if "skip" not in enabled else x + self.down(self.up(x))

    return loop(prepare, Net(Own), before=lambda step, net: enabled.add("skip") if step == 9 else None)


_CONTEXT_SCALE: ContextVar[float] = ContextVar("scale", default=1.0)


@program
def context_variable(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * _CONTEXT_SCALE.get())

    def loss(net: Any, x: Tensor, step: int) -> Tensor:
        token = _CONTEXT_SCALE.set(0.5 if step > 9 else 1.0)
        try:
            return net(x).square().mean()
        finally:
            _CONTEXT_SCALE.reset(token)

    return loop(prepare, Net(Own), loss=loss, steps=28)


_LOCAL = threading.local()


@program
def thread_local(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * getattr(_LOCAL, "scale", 1.0))

    def before(step: int, net: Any) -> None:
        _LOCAL.scale = 0.5 if step > 9 else 1.0

    return loop(prepare, Net(Own), before=before, steps=28)


class _Settings:
    """Attributes that are looked up when they are read."""

    def __init__(self) -> None:
        self.values = {"scale": 1.0}

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["values"][name]


@program
def attributes_looked_up(prepare: Prepare) -> list[Any]:
    settings = _Settings()

    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * settings.scale)

    def before(step: int, net: Any) -> None:
        settings.values["scale"] = 0.5 if step > 9 else 1.0

    return loop(prepare, Net(Own), before=before, steps=28)


@program
def method_bound_later(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.act = torch.tanh

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.act(self.up(x)))

    def before(step: int, net: Any) -> None:
        if step == 9:
            net.blocks[1].act = torch.relu

    return loop(prepare, Net(Own), before=before, steps=28)


@program
def partial_with_a_setting(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.act = functools.partial(torch.nn.functional.leaky_relu, negative_slope=0.1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.act(self.up(x)))

    def before(step: int, net: Any) -> None:
        if step == 9:
            net.blocks[1].act.keywords["negative_slope"] = 0.5

    return loop(prepare, Net(Own), before=before, steps=28)
