"""Programs whose units are given more than tensors, write their arguments, or have several shapes (escaping.py)."""

from dataclasses import dataclass
from typing import Any

import torch
from escaping import Block, Net, Prepare, Program, loop
from torch import Tensor, nn

PROGRAMS: dict[str, Program] = {}


def program(train: Program) -> Program:
    PROGRAMS[train.__name__] = train
    return train


@program
def list_argument_grows(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
            hidden = self.inner(x)
            seen.append(hidden.abs().mean())
            return x + self.down(hidden)

    def run(blocks: Any, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for block in blocks:
            x = block(x, seen)
        return x + torch.stack(seen).sum()

    return loop(prepare, Net(Own, run=run))


@program
def dict_argument_is_written(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor, extra: dict[str, Tensor]) -> Tensor:
            hidden = self.inner(x)
            extra["loss"] = extra["loss"] + hidden.square().mean()
            return x + self.down(hidden)

    def run(blocks: Any, x: Tensor) -> Tensor:
        extra = {"loss": x.new_zeros(())}
        for block in blocks:
            x = block(x, extra)
        return x + extra["loss"]

    return loop(prepare, Net(Own, run=run))


@program
def nested_containers(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor, tables: tuple[Tensor, dict[str, list[Tensor]]]) -> Tensor:
            return super().forward(x * tables[0] + tables[1]["bias"][0])

    def run(blocks: Any, x: Tensor) -> Tensor:
        tables = (torch.linspace(0, 1, 8), {"bias": [torch.ones(8), torch.zeros(8)]})
        for block in blocks:
            x = block(x, tables)
        return x

    return loop(prepare, Net(Own, run=run))


@program
def keywords_in_another_order(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor, **parts: Tensor) -> Tensor:
            for number, part in enumerate(parts.values()):
                x = x + (number + 1) * part
            return super().forward(x)

    def run(blocks: Any, x: Tensor, *, turned: bool) -> Tensor:
        one, two = torch.full((8,), 0.1), torch.full((8,), 0.3)
        for block in blocks:
            x = block(x, two=two, one=one) if turned else block(x, one=one, two=two)
        return x

    return loop(prepare, Net(Own, run=run), loss=lambda net, x, step: net(x, turned=step % 4 == 3).square().mean())


@program
def flag_that_changes(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor, doubled: bool = False) -> Tensor:
            return super().forward(2 * x if doubled else x)

    return loop(prepare, Net(Own), loss=lambda net, x, step: net(x, doubled=step % 3 == 2).square().mean())


@program
def number_that_changes(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor, scale: float) -> Tensor:
            return super().forward(x * scale)

    return loop(prepare, Net(Own), loss=lambda net, x, step: net(x, scale=1.0 + step / 10).square().mean())


@program
def integer_that_changes(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor, shift: int) -> Tensor:
            return super().forward(torch.roll(x, shift, -1))

    return loop(prepare, Net(Own), loss=lambda net, x, step: net(x, shift=step % 5).square().mean())


@program
def function_as_an_argument(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor, act: Any) -> Tensor:
            return x + self.down(act(self.up(x)))

    def loss(net: Any, x: Tensor, step: int) -> Tensor:
        return net(x, act=torch.tanh if step % 2 else torch.relu).square().mean()

    return loop(prepare, Net(Own), loss=loss)


@program
def dataclass_as_an_argument(prepare: Prepare) -> list[Any]:
    @dataclass
    class State:
        x: Tensor
        total: Any = 0.0

    class Own(Block):
        def forward(self, state: Any) -> Any:
            hidden = self.inner(state.x)
            return State(state.x + self.down(hidden), state.total + hidden.square().mean())

    def run(blocks: Any, x: Tensor) -> Tensor:
        state = State(x)
        for block in blocks:
            state = block(state)
        return state.x + state.total

    return loop(prepare, Net(Own, run=run))


@program
def writes_its_input(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.add_(0.1))

    return loop(prepare, Net(Own))


@program
def writes_an_input_without_gradient(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor, total: Tensor) -> Tensor:
            hidden = self.inner(x)
            total += hidden.detach().mean()
            return x + self.down(hidden)

    def run(blocks: Any, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for block in blocks:
            x = block(x, total)
        return x * (1 + total)

    return loop(prepare, Net(Own, run=run))


@program
def one_tensor_given_twice(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, query: Tensor, key: Tensor) -> Tensor:
            return super().forward(query * 2 if query is key else query + key)

    def run(blocks: Any, x: Tensor, *, same: bool) -> Tensor:
        for block in blocks:
            x = block(x, x if same else x.detach())
        return x

    return loop(prepare, Net(Own, run=run), loss=lambda net, x, step: net(x, same=step % 3 != 2).square().mean())


@program
def transposed_input(prepare: Prepare) -> list[Any]:
    def run(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x.t().contiguous().t())
        return x

    return loop(prepare, Net(run=run))


@program
def several_shapes(prepare: Prepare) -> list[Any]:
    return loop(prepare, Net(), rows=lambda step: (4, 2, 5)[step % 3], steps=24)


@program
def unused_parameter(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(8, 8)

    return loop(prepare, Net(Own))


@program
def parameter_used_sometimes(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor, gated: bool) -> Tensor:
            return super().forward(x * self.gate if gated else x)

    return loop(prepare, Net(Own), loss=lambda net, x, step: net(x, gated=step % 2 == 0).square().mean())


@program
def block_called_twice(prepare: Prepare) -> list[Any]:
    def run(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(block(x))
        return x

    return loop(prepare, Net(run=run), units="class:Block")


@program
def two_losses(prepare: Prepare) -> list[Any]:
    def loss(net: Any, x: Tensor, step: int) -> Tensor:
        found = net(x)
        if step % 4 == 3:
            found.abs().mean().backward(retain_graph=True)
        return found.square().mean()

    return loop(prepare, Net(), loss=loss)
