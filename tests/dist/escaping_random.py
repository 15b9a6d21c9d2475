"""Programs whose units draw random numbers (escaping.py)."""

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from escaping import Block, Net, Prepare, Program, loop
from torch import Tensor

PROGRAMS: dict[str, Program] = {}


def program(train: Program) -> Program:
    PROGRAMS[train.__name__] = train
    return train


@program
def layer_drop_by_random(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x if random.random() < 0.3 else super().forward(x)

    return loop(prepare, Net(Own))


@program
def noise_scale_by_random(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * random.uniform(0.5, 1.5))

    return loop(prepare, Net(Own))


@program
def own_random_in_attribute(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.draws = random.Random(3)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.draws.random())

    return loop(prepare, Net(Own))


@program
def own_random_in_closure(prepare: Prepare) -> list[Any]:
    draws = random.Random(3)

    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x if draws.random() < 0.3 else super().forward(x)

    return loop(prepare, Net(Own))


@program
def numpy_global_draw(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * float(np.random.rand()))

    return loop(prepare, Net(Own))


@program
def numpy_generator_in_attribute(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.draws = np.random.default_rng(3)

        def forward(self, x: Tensor) -> Tensor:
            return x if self.draws.random() < 0.3 else super().forward(x)

    return loop(prepare, Net(Own))


@program
def numpy_array_in_attribute(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scales = np.ones(8, dtype=np.float32)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * torch.from_numpy(self.scales))

    def before(step: int, net: Any) -> None:
        net.blocks[0].scales[:] = 1.0 + step / 10

    return loop(prepare, Net(Own), before=before)


@program
def torch_generator_of_its_own(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.draws = torch.Generator().manual_seed(4)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.rand(x.shape, generator=self.draws) / 10)

    return loop(prepare, Net(Own))


@program
def dropout(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 0.3, training=self.training))

    return loop(prepare, Net(Own))


@program
def dropout_that_nobody_uses(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            F.dropout(x, 0.5)
            return super().forward(F.dropout(x, 0.3))

    return loop(prepare, Net(Own))
