"""Several forwards before a backward, several backwards, and forwards that are dropped; units are partly frozen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

import shardwise
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES

WIDTH = 4
NUM_STEPS = 3


class Adapted(nn.Module):
    """A frozen linear layer and a trained adapter of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x) + self.up(self.down(x))


class Recurrent(nn.Module):
    """A GRU of which every second parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)
        for parameter in list(self.cell.parameters())[::2]:
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cell(x)[0]


class Normed(nn.Module):
    """A norm whose weight is frozen, and a trained layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.norm.weight.requires_grad_(False)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.norm(x))


class Scaled(nn.Module):
    """A plain product with a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(x * self.scale)


BLOCKS: dict[str, type[nn.Module]] = {block.__name__: block for block in (Adapted, Recurrent, Normed, Scaled)}


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(BLOCKS[kind]() for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


Loss = Callable[[], Tensor]


def dropped(loss: Loss) -> None:
    loss()
    loss().backward()


def dropped_after(loss: Loss) -> None:
    loss().backward()
    loss()
    loss()


def two_summed(loss: Loss) -> None:
    (loss() + loss()).backward()


def three_summed(loss: Loss) -> None:
    (loss() * loss() + loss()).backward()


def backwards_in_turn(loss: Loss) -> None:
    first, second = loss(), loss()
    first.backward()
    second.backward()


def backwards_in_reverse(loss: Loss) -> None:
    first, second = loss(), loss()
    second.backward()
    first.backward()


def retained(loss: Loss) -> None:
    found = loss()
    found.backward(retain_graph=True)
    found.backward()


def with_reference(loss: Loss) -> None:
    """A forward without gradients in between, as of a reference model."""
    chosen = loss()
    with torch.no_grad():
        reference = loss()
    (chosen - reference + loss()).square().backward()


WAYS: dict[str, Callable[[Loss], None]] = {
    way.__name__: way
    for way in (
        *(dropped, dropped_after, two_summed, three_summed),
        *(backwards_in_turn, backwards_in_reverse, retained, with_reference),
    )
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"prefetch": 3},
    {"prefetch": 0, "recompute": "full"},
    {"recompute": "selective"},
    {"offload_activations": True},
]


def make(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Model(kind)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def losses(model: nn.Module, *, rank: int, step: int) -> Loss:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return lambda: model(torch.randn(2, 3, WIDTH, generator=generator)).square().mean()


def one_process(kind: str, way: str, *, passes: int) -> dict[str, Tensor]:
    model, optimizer = make(kind)
    for step in range(NUM_STEPS):
        sums: dict[str, Tensor] = {}
        for rank in range(2):
            for number in range(passes):
                WAYS[way](losses(model, rank=rank, step=passes * step + number))
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad
                    parameter.grad = None
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name] / 2 if name in sums else None
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def on_ranks(rank: int, way: str, cases: list[tuple[str, str, int, int]]) -> None:
    for kind, strategy, setting, passes in cases:
        model, optimizer = make(kind)
        shardwise.prepare(model, optimizer, Plan(strategy=strategy, units="class:" + kind, **SETTINGS[setting]))
        for step in range(NUM_STEPS):
            for number in range(passes):
                with shardwise.accumulate(model, enabled=number + 1 < passes):
                    WAYS[way](losses(model, rank=rank, step=passes * step + number))
            optimizer.step()
            optimizer.zero_grad()
        expected = one_process(kind, way, passes=passes)
        for name, value in model.state_dict().items():
            off = (value - expected[name]).abs().max().item()
            assert off <= 1e-6, f"{kind} {strategy} {SETTINGS[setting]} {passes} passes: {name} is off by {off}"


EVERY = [
    (kind, strategy, setting, passes)
    for kind in BLOCKS
    for strategy in STRATEGIES
    for setting in range(len(SETTINGS))
    for passes in (1, 2)
]


@pytest.mark.parametrize("way", WAYS)
def test_partly_frozen_units_are_right_however_forwards_and_backwards_follow(way: str) -> None:
    """Each way with another part of all combinations."""
    cases = EVERY[list(WAYS).index(way) :: 97]
    run_ranks(on_ranks, num_ranks=2, args=(way, cases))


@pytest.mark.whole
@pytest.mark.parametrize("way", WAYS)
def test_and_in_every_combination(way: str) -> None:
    run_ranks(on_ranks, num_ranks=2, args=(way, EVERY), timeout_seconds=300)
