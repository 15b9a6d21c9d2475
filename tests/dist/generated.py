"""Modules that are generated from a description; importable by ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from cases import Batch
from torch import Tensor, nn

WIDTH = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What a generated block is made of: a hidden size, its parts, and whether an earlier block is used again."""

    hidden: int
    norm: bool
    residual: bool
    inside: tuple["Layer", ...] = ()
    again: bool = False


class Block(nn.Module):
    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        self.up = nn.Linear(WIDTH, layer.hidden)
        self.down = nn.Linear(layer.hidden, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH) if layer.norm else None
        self.inside = nn.ModuleList(Block(inner) for inner in layer.inside)

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

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if block.layer.again:
                x = self.blocks[index // 2](x)
        return self.last(x)


def make(layers: tuple[Layer, ...]) -> tuple[nn.Module, Callable[[int, int], Batch]]:
    def batch(step: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(10 * step + rank)
        return torch.randn(3, WIDTH, generator=generator), torch.randn(3, 1, generator=generator)

    return Generated(layers), batch
