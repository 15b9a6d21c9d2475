"""A model that is changed after it was prepared, and one that trains through another method; importable by ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 6


class LateBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class LateAdapter(nn.Module):
    """A linear that is there already, frozen, and the product of two small matrices on top."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class LateModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(LateBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Through its own call, and with parameters besides it."""
        return scale * self(x).square().mean() + self.head.weight.abs().mean()

    def through_forward(self, x: Tensor) -> Tensor:
        return self.forward(x).square().mean()


def make_late() -> LateModel:
    torch.manual_seed(7)
    return LateModel()


def inputs(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def make_adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def replace_head(model: LateModel, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """What was the head's leaves the model; in one process it stays in the optimizer, without a gradient."""
    model.head = nn.Linear(WIDTH, 2)
    return list(model.head.parameters())


def add_adapters(model: LateModel, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    new: list[nn.Parameter] = []
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, LateBlock)
        block.linear = LateAdapter(block.linear)
        new += [block.linear.down.weight, block.linear.up.weight]
    return new


def both(model: LateModel, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [*add_adapters(model, optimizer), *replace_head(model, optimizer)]


CHANGES: dict[str, Callable[[LateModel, torch.optim.Optimizer], list[nn.Parameter]]] = {
    "head": replace_head,
    "adapters": add_adapters,
    "both": both,
}


def change(name: str, model: LateModel, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    torch.manual_seed(11)
    return CHANGES[name](model, optimizer)


def averaged_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[int], Tensor], *, num_ranks: int = 2
) -> None:
    """A step of one process: the mean of the ranks' gradients."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = [torch.autograd.grad(loss(rank), parameters) for rank in range(num_ranks)]
    for parameter, *parts in zip(parameters, *grads, strict=True):
        parameter.grad = sum(parts[1:], parts[0]) * (1 / num_ranks)
    optimizer.step()
    optimizer.zero_grad()
