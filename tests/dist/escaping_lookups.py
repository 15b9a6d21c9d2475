"""Programs whose units look things up that may change, or come later: attributes, keys, references (escaping.py)."""

import functools
import weakref
from types import SimpleNamespace
from typing import Any

from escaping import Block, Net, Prepare, Program, loop
from torch import Tensor

PROGRAMS: dict[str, Program] = {}
# As many that what has changed is recorded and replayed too.
_STEPS = 28


def program(train: Program) -> Program:
    PROGRAMS[train.__name__] = train
    return train


@program
def weak_reference_to_settings(prepare: Prepare) -> list[Any]:
    class Settings:
        scale = 1.0

    settings = Settings()

    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.settings = weakref.ref(settings)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.settings().scale)

    def before(step: int, net: Any) -> None:
        settings.scale = 0.5 if step > 9 else 1.0

    return loop(prepare, Net(Own), before=before, steps=_STEPS)


@program
def weak_reference_that_dies(prepare: Prepare) -> list[Any]:
    class Settings:
        scale = 0.5

    kept = [Settings()]

    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.settings = weakref.ref(kept[0])

        def forward(self, x: Tensor) -> Tensor:
            found = self.settings()
            return super().forward(x if found is None else x * found.scale)

    def before(step: int, net: Any) -> None:
        if step == 10:
            kept.clear()

    return loop(prepare, Net(Own), before=before, steps=_STEPS)


class _Fading:
    """A descriptor that counts its reads."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}_reads"

    def __get__(self, held: Any, owner: type) -> float:
        reads = held.__dict__.get(self.name, 0)
        held.__dict__[self.name] = reads + 1
        return 1 / (1 + reads / 4)


@program
def descriptor_that_counts(prepare: Prepare) -> list[Any]:
    class Own(Block):
        scale = _Fading()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale)

    return loop(prepare, Net(Own))


@program
def property_that_counts(prepare: Prepare) -> list[Any]:
    class Own(Block):
        reads = 0

        @property
        def scale(self) -> float:
            self.reads += 1
            return 1 / (1 + self.reads / 4)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale)

    return loop(prepare, Net(Own), after=lambda step, net: [net.blocks[0].reads])


@program
def cached_property(prepare: Prepare) -> list[Any]:
    class Own(Block):
        made = 0

        @functools.cached_property
        def scale(self) -> float:
            self.made += 1
            return 1 / (1 + self.made)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale)

    def before(step: int, net: Any) -> None:
        if step in (5, 11):
            net.blocks[1].__dict__.pop("scale", None)

    return loop(prepare, Net(Own), before=before, steps=_STEPS)


_CACHED_SCALE = {"scale": 1.0}


@functools.lru_cache
def _cached_scale(number: int) -> float:
    return _CACHED_SCALE["scale"] / number


@program
def cached_function(prepare: Prepare) -> list[Any]:
    """Its result is that of the first call, until the cache is cleared."""
    _cached_scale.cache_clear()
    _CACHED_SCALE["scale"] = 1.0

    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * _cached_scale(2))

    def before(step: int, net: Any) -> None:
        _CACHED_SCALE["scale"] = 0.5
        if step == 10:
            _cached_scale.cache_clear()

    return loop(prepare, Net(Own), before=before, steps=_STEPS)


@program
def exception_as_control_flow(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scales: dict[str, float] = {}

        def forward(self, x: Tensor) -> Tensor:
            try:
                x = x * self.scales["scale"]
            except KeyError:
                x = x * 0.9
            return super().forward(x)

    def before(step: int, net: Any) -> None:
        if step == 9:
            net.blocks[0].scales["scale"] = 0.5

    return loop(prepare, Net(Own), before=before, steps=_STEPS)


@program
def attribute_added_later(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            try:
                x = x * self.scale
            except AttributeError:
                x = x * 0.9
            return super().forward(x)

    def before(step: int, net: Any) -> None:
        if step == 9:
            net.blocks[0].scale = 0.5

    return loop(prepare, Net(Own), before=before, steps=_STEPS)


@program
def global_added_later(prepare: Prepare) -> list[Any]:
    globals().pop("_LATER", None)

    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            try:
                x = x * _LATER  # type: ignore[name-defined]
            except NameError:
                x = x * 0.9
            return super().forward(x)

    def before(step: int, net: Any) -> None:
        if step == 9:
            globals()["_LATER"] = 0.5

    return loop(prepare, Net(Own), before=before, steps=_STEPS)


@program
def key_that_is_popped(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.once: dict[str, float] = {}

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.once.pop("scale", 1.0))

    def before(step: int, net: Any) -> None:
        if step in (3, 9):
            net.blocks[0].once["scale"] = 0.5

    return loop(prepare, Net(Own), before=before, steps=_STEPS)


@program
def attributes_that_are_asked_for(prepare: Prepare) -> list[Any]:
    settings = SimpleNamespace()

    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            if hasattr(settings, "scale"):
                x = x * settings.scale
            return super().forward(x * getattr(self, "other", 1.0))

    def before(step: int, net: Any) -> None:
        if step == 6:
            settings.scale = 0.5
        if step == 11:
            net.blocks[0].other = 0.25

    return loop(prepare, Net(Own), before=before, steps=_STEPS)


class _Counted(dict[str, float]):
    reads = 0

    def __getitem__(self, key: str) -> float:
        self.reads += 1
        return super().__getitem__(key) / self.reads


@program
def dict_of_its_own_class(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scales = _Counted(scale=1.0)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scales["scale"])

    return loop(prepare, Net(Own), after=lambda step, net: [net.blocks[0].scales.reads])
