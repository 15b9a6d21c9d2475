"""A model as adapters train it: a frozen base, small trained parameters in its blocks; importable by ranks."""

from collections.abc import Callable
from typing import Any

import torch
from cases import Batch
from torch import Tensor, nn

from shardwise.models.tasks import cross_entropy

WIDTH = 64
RANK = 4
VOCABULARY = 32
NUM_TRAINED = 3 * WIDTH * RANK + 2 * WIDTH
"""Elements: two adapters, which share one of their matrices, and a norm. Each a multiple of the alignment."""


class AdaptedLinear(nn.Module):
    """A frozen linear, and the product of two small matrices on top."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class AdaptedBlock(nn.Module):
    """`adapted`, or wholly frozen."""

    def __init__(self, *, adapted: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        nn.init.normal_(self.norm.bias)
        self.linear = AdaptedLinear() if adapted else nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Adapted(nn.Module):
    """The embedding is the head's weight, too, and frozen; two adapters in different units share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(AdaptedBlock(adapted=adapted) for adapted in (True, False, True))
        self.blocks[2].linear.down.weight = self.blocks[0].linear.down.weight
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_adapted() -> tuple[nn.Module, Callable[[int, int], Batch]]:
    def batch(step: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(100 * step + rank)
        tokens = torch.randint(VOCABULARY, (2, 9), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    return Adapted(), batch


def one_step(model: nn.Module, batches: list[Batch]) -> None:
    """The mean gradient of these batches, summed in their order, into `p.grad`."""
    sums: dict[nn.Parameter, Tensor] = {}
    for batch in batches:
        model.zero_grad()
        cross_entropy(model, batch).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                before = sums.get(parameter)
                sums[parameter] = parameter.grad.clone() if before is None else before + parameter.grad
    for parameter, total in sums.items():
        parameter.grad = total * (1 / len(batches))


class HalfBase(nn.Module):
    """A frozen base in bf16 and an adapter in fp32, as PEFT makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64, bias=False).bfloat16().requires_grad_(False)
        self.adapter = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x.bfloat16()).float() + self.adapter(x.to(self.adapter.weight.dtype))


def make_half() -> Any:
    def batch(step: int, rank: int) -> Any:
        generator = torch.Generator().manual_seed(100 * step + rank)
        return torch.randn(4, 64, generator=generator), torch.randn(4, 64, generator=generator)

    return nn.Sequential(HalfBase(), HalfBase()), batch
