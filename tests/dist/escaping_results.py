"""Programs whose units return more than one tensor, and what becomes of it (escaping.py)."""

from collections import namedtuple
from typing import Any

import torch
from escaping import Block, Net, Prepare, Program, loop
from torch import Tensor

PROGRAMS: dict[str, Program] = {}


def program(train: Program) -> Program:
    PROGRAMS[train.__name__] = train
    return train


@program
def named_tuple_out(prepare: Prepare) -> list[Any]:
    found = namedtuple("found", ["x", "hidden"])

    class Own(Block):
        def forward(self, x: Tensor) -> Any:
            hidden = self.inner(x)
            return found(x + self.down(hidden), hidden)

    def run(blocks: Any, x: Tensor) -> Tensor:
        total = 0.0
        for block in blocks:
            one = block(x)
            x, total = one.x, total + one.hidden.mean()
        return x + total

    return loop(prepare, Net(Own, run=run))


@program
def dict_out(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Any:
            hidden = self.inner(x)
            return {"x": x + self.down(hidden), "hidden": hidden, "name": "own", "nothing": None}

    def run(blocks: Any, x: Tensor) -> Tensor:
        total = 0.0
        for block in blocks:
            one = block(x)
            assert one["name"] == "own"
            x, total = one["x"], total + one["hidden"].mean()
        return x + total

    return loop(prepare, Net(Own, run=run))


@program
def empty_tuple_out(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor, keep: bool) -> Any:
            hidden = self.inner(x)
            return (x + self.down(hidden), (hidden,) if keep else ())

    def run(blocks: Any, x: Tensor, *, keep: bool) -> Tensor:
        for block in blocks:
            x, kept = block(x, keep)
            x = x + sum(one.mean() for one in kept)
        return x

    return loop(prepare, Net(Own, run=run), loss=lambda net, x, step: net(x, keep=step % 4 == 3).square().mean())


@program
def shape_out(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x.shape[0]

    def run(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x, rows = block(x)
            x = x * (rows / 4)
        return x

    return loop(prepare, Net(Own, run=run), rows=lambda step: 3 + step % 3)


@program
def returns_its_input_too(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x

    def run(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x, before = block(x)
            x = x + before / 10
        return x

    return loop(prepare, Net(Own, run=run))


@program
def returns_a_view_of_its_input(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x[:, :4]

    def run(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x, part = block(x)
            x = x + part.mean()
        return x

    return loop(prepare, Net(Own, run=run))


@program
def returns_views_of_one_result(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x).chunk(2, -1)

    def run(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = torch.cat(block(x)[::-1], -1)
        return x

    return loop(prepare, Net(Own, run=run))


@program
def writes_into_a_view_of_its_result(prepare: Prepare) -> list[Any]:
    class Own(Block):
        def forward(self, x: Tensor) -> Any:
            found = super().forward(x)
            return found, found.detach()

    def run(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x, bare = block(x)
            with torch.no_grad():
                bare.mul_(0.5)
        return x

    return loop(prepare, Net(Own, run=run))


@program
def output_kept_into_the_next_pass(prepare: Prepare) -> list[Any]:
    kept: list[Tensor] = []

    def run(blocks: Any, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        kept.append(x.detach())
        return x + (kept[-2].mean() if len(kept) > 1 else 0.0)

    return [*loop(prepare, Net(run=run)), *kept]
