"""Models that are awkward to train on many ranks, small, with batches that tell them what to do; importable by ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 6
NUM_STEPS = 4

AwkwardBatch = tuple[Tensor, Tensor, int, int]
"""Inputs, targets, the step, and the rank whose batch it is."""


def batch(step: int, rank: int) -> AwkwardBatch:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, WIDTH, generator=generator)
    return x, torch.randn(4, WIDTH, generator=generator), step, rank


def loss_of(model: nn.Module, given: AwkwardBatch) -> Tensor:
    x, y, step, rank = given
    loss = (model(x, step, rank) - y).square().mean()
    for module in model.modules():
        aux = getattr(module, "aux", None)
        if aux is not None:
            loss = loss + 0.1 * aux
    return loss


class Block(nn.Module):
    """A unit: two linears around a tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 11)
        self.down = nn.Linear(11, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """First a linear of the root, then what `run` does with the blocks."""

    def __init__(self, make_block: Callable[[], nn.Module] = Block, num_blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make_block() for _ in range(num_blocks))

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        return self.run(self.first(x), step, rank)

    def run(self, x: Tensor, step: int, rank: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


# Parameters that are not used


class PartlyUsedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(WIDTH, 3)
        self.sometimes = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, use: bool = False) -> Tensor:
        return super().forward(x * self.sometimes if use else x)


class PartlyUsed(Net):
    """`spare` is never used; `sometimes` by rank 1 in odd steps."""

    def __init__(self) -> None:
        super().__init__(PartlyUsedBlock)

    def run(self, x: Tensor, step: int, rank: int) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x, use=rank == 1 and step % 2 == 1 and index == 1)
        return x


class Branches(Net):
    """Each rank takes another branch, changing from step to step; the last block is called by rank 0 in step 2 alone."""

    def __init__(self) -> None:
        super().__init__(num_blocks=5)

    def run(self, x: Tensor, step: int, rank: int) -> Tensor:
        x = self.blocks[0](x)
        x = self.blocks[1 + (step + rank) % 2](x)
        x = self.blocks[3](x)
        return self.blocks[4](x) if (step, rank) == (2, 0) else x


class DroppedLayers(Net):
    """Layers are left out at random, differently on each rank."""

    def __init__(self) -> None:
        super().__init__(num_blocks=5)

    def run(self, x: Tensor, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(7 * step + rank)
        for block, keep in zip(self.blocks, torch.rand(5, generator=generator) < 0.6, strict=True):
            x = block(x) if keep else x
        return x


# Calls


class CalledTwice(Net):
    def run(self, x: Tensor, step: int, rank: int) -> Tensor:
        a, b, c = self.blocks
        return a(c(b(a(a(x)))))


class CalledOftenByOne(Net):
    """The number of calls differs from rank to rank."""

    def run(self, x: Tensor, step: int, rank: int) -> Tensor:
        for _ in range(1 + rank % 2):
            x = self.blocks[1](self.blocks[0](x))
        return self.blocks[2](x)


class LongSkip(Net):
    def run(self, x: Tensor, step: int, rank: int) -> Tensor:
        a, b, c = self.blocks
        first = a(x)
        return c(b(first) * 0.5 + x) + first


class Nested(Net):
    """Units inside units: `class:Outer,Block`."""

    def __init__(self) -> None:
        super().__init__(Outer)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.ModuleList([Block(), Block()])
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        for block in self.inner:
            y = block(y)
        return x + self.after(y)


# Outputs


@dataclass
class Output:
    values: Tensor
    unused: Tensor
    label: str = "x"


class Opaque:
    def __init__(self, values: Tensor) -> None:
        self.values = values


class TupleBlock(Block):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, None, (self.up(x), 3)


class DictBlock(Block):
    def forward(self, x: Tensor, *, scale: Mapping[str, float]) -> Any:
        return {"values": super().forward(x) * scale["by"], "unused": self.down.weight.sum()}


class DataclassBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return Output(values=super().forward(x), unused=self.up(x).sum())


class OpaqueBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return Opaque(super().forward(x))


class NoneBlock(Block):
    """Returns nothing: its result is fetched from it."""

    def forward(self, x: Tensor) -> None:
        self.result = super().forward(x)


class Outputs(Net):
    def run(self, x: Tensor, step: int, rank: int) -> Tensor:
        for block in self.blocks:
            match block:
                case TupleBlock():
                    x = block(x)[0]
                case DictBlock():
                    x = block(x, scale={"by": 0.5})["values"]
                case NoneBlock():
                    block(x)
                    x = block.result
                case _:
                    x = block(x).values
        return x


class Auxiliary(Net):
    """A loss that is kept on the module, of the block itself or of a part of it."""

    def __init__(self) -> None:
        super().__init__(AuxiliaryBlock)


class AuxiliaryBlock(Block):
    aux: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.aux = self.up(x).square().mean()
        return super().forward(x)


class Embedded(Net):
    """The first unit's input needs no gradient, nor can it have one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def run(self, x: Tensor, step: int, rank: int) -> Tensor:
        return super().run(x + self.table(torch.arange(4)), step, rank)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, WIDTH)

    def forward(self, index: Tensor) -> Tensor:
        return self.rows(index)


class Detached(Net):
    """No gradient flows through the second block, though its parameters could have one."""

    def run(self, x: Tensor, step: int, rank: int) -> Tensor:
        a, b, c = self.blocks
        x = a(x)
        return c(x + b(x).detach())


class Squared(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return 2 * x * weight * grad, (x * x * grad).sum(0)


class OwnFunction(Net):
    def __init__(self) -> None:
        super().__init__(OwnFunctionBlock)


class OwnFunctionBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Squared.apply(torch.tanh(x), self.weight))


# Frozen


def freeze(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        for parameter in model.get_submodule(name).parameters():
            parameter.requires_grad_(False)
    return model


def partly_frozen() -> nn.Module:
    """The lower part is frozen: backward needs it after the upper part's gradients have come."""
    return freeze(Net(), "blocks.0.up", "blocks.1.up", "blocks.2.down")


def frozen_in_the_middle() -> nn.Module:
    return freeze(Net(), "blocks.1")


def frozen_first() -> nn.Module:
    """No gradient flows through the first units."""
    return freeze(Net(), "first", "blocks.0", "blocks.1")


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a parameter is unused, another is used on one rank": (PartlyUsed, "class:PartlyUsedBlock"),
    "ranks take different branches": (Branches, "class:Block"),
    "layers are dropped at random": (DroppedLayers, "class:Block"),
    "a unit is called twice": (CalledTwice, "class:Block"),
    "ranks call units differently often": (CalledOftenByOne, "class:Block"),
    "a long skip": (LongSkip, "class:Block"),
    "units inside units": (Nested, "class:Outer,Block"),
    "units that are called inside one another and leaves": (Nested, "leaf"),
    "outputs are tuples": (partial(Outputs, TupleBlock), "class:TupleBlock"),
    "outputs are dicts, inputs are keywords": (partial(Outputs, DictBlock), "class:DictBlock"),
    "outputs are dataclasses": (partial(Outputs, DataclassBlock), "class:DataclassBlock"),
    "outputs are None": (partial(Outputs, NoneBlock), "class:NoneBlock"),
    "an auxiliary loss is kept on the module": (Auxiliary, "class:AuxiliaryBlock"),
    "an input without gradient": (Embedded, "class:Block,Table"),
    "a block is detached": (Detached, "class:Block"),
    "an autograd function of one's own": (OwnFunction, "class:OwnFunctionBlock"),
    "units are partly frozen": (partly_frozen, "class:Block"),
    "a unit is all frozen": (frozen_in_the_middle, "class:Block"),
    "the first units are frozen": (frozen_first, "class:Block"),
}


def make(name: str) -> tuple[nn.Module, Callable[[int, int], Any]]:
    return MODELS[name][0](), batch


def make_opaque() -> tuple[nn.Module, Callable[[int, int], Any]]:
    return Outputs(OpaqueBlock), batch
