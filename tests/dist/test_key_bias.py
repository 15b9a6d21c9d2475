"""The bias of attention's keys has the gradient 0, in exact arithmetic; what is left of it is rounding.

A softmax does not change if the same number is added to all scores of a query, which is what this bias does. Adam divides
a gradient by its own size, so that it steps by noise: two correct programs that round differently give other values.
"""

from typing import Any

import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise.plan import Plan

NUM_STEPS = 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(5, 8)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)
        for layer in self.children():
            # As in BERT.
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))
        return self.head(x.tanh())


def trained(model: Any, optimizer: Any, *, rank: int) -> dict[str, float]:
    """Train with two backwards per update; return the largest element of each parameter's gradient."""
    largest: dict[str, float] = {}
    for step in range(NUM_STEPS):
        for part in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
            x = torch.randn(4, 6, 5, generator=generator, dtype=torch.float64).to(next(model.parameters()).dtype)
            (model(x).square().mean() / 2).backward()
        for name, parameter in model.named_parameters():
            name = name.removeprefix("module.")
            largest[name] = max(largest.get(name, 0.0), float(parameter.grad.abs().max()))
        optimizer.step()
        optimizer.zero_grad()
    return largest


def compared(rank: int, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """Name → the difference of ours from torch's DDP in parts of the largest value, and the largest gradient."""
    models = [Attention().to(dtype) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    theirs = DistributedDataParallel(models[0])
    shardwise.prepare(models[1], optimizers[1], Plan(strategy="ddp", precision="native"))
    largest = trained(theirs, optimizers[0], rank=rank)
    trained(models[1], optimizers[1], rank=rank)
    expected, found = models[0].state_dict(), models[1].state_dict()
    return {
        name: (float((found[name] - value).abs().max() / value.abs().max()), largest[name])
        for name, value in expected.items()
    }


def test_training_differs_from_torchs_ddp_only_in_the_bias_of_keys_whose_gradient_is_rounding() -> None:
    for dtype in (torch.float32, torch.float64):
        epsilon = torch.finfo(dtype).eps
        for found in run_ranks(compared, num_ranks=2, args=(dtype,)):
            difference, gradient = found.pop("key.bias")
            others = [other for _, other in found.values()]
            assert difference > 0.01
            assert gradient < 10 * epsilon * min(others)
            assert all(small < 100 * epsilon for small, _ in found.values())
