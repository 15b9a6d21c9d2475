"""Modules that are generated from a description; importable by ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What a generated block is made of: a hidden size, its parts, and what is done with it.

    again       an earlier block is called once more after it
    branch      it is called in some steps, on some ranks
    skip        what the first block gave is added to what it gives
    frozen      its first linear, its second, both or none
    """

    hidden: int
    norm: bool
    residual: bool
    inside: tuple["Layer", ...] = ()
    again: bool = False
    branch: bool = False
    skip: bool = False
    frozen: str = ""


class Block(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        self.up = nn.Linear(WIDTH, layer.hidden)
        self.down = nn.Linear(layer.hidden, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH) if layer.norm else None
        self.inside = nn.ModuleList(Block(inner) for inner in layer.inside)
        for name in layer.frozen.split():
            getattr(self, name).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.norm is None else self.norm(x)
        y = self.down(torch.tanh(self.up(y)))
        for block in self.inside:
            y = block(y)
        return x + y if self.layer.residual else y


class Generated(nn.Module):
    def __init__(self, layers: tuple[Layer, ...]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(layer) for layer in layers)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, key: int) -> Tensor:
        x = self.first(x)
        first = None
        for index, block in enumerate(self.blocks):
            if block.layer.branch and (key + index) % 3 == 0:
                continue
            x = block(x)
            first = x if first is None else first
            if block.layer.again:
                x = self.blocks[index // 2](x)
            if block.layer.skip:
                x = x + first
        return self.last(x)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    x, y, key = batch
    return (model(x, key) - y).square().mean()


def make(layers: tuple[Layer, ...]) -> tuple[nn.Module, Callable[[int, int], Any]]:
    def batch(step: int, rank: int) -> Any:
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(3, WIDTH, generator=generator)
        return x, torch.randn(3, 1, generator=generator), 2 * step + rank

    return Generated(layers), batch
