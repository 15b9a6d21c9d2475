"""What benchmarks/kills.py trains: a model whose weights count how often each sample was seen."""

import os
import random
import time

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from shardwise.models.tasks import Task

NUM_SAMPLES, WIDTH = 48, 16
PASS_SECONDS = 0.08  # at most, where KILLS_PASS_SECONDS does not say otherwise


class Numbered(Dataset[tuple[Tensor, int]]):
    """Samples that bring their number along."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)), index


class Counting(nn.Module):
    """A few blocks with dropout, so that random numbers matter; and `seen`, whose gradient is 1 for each sample."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.GELU()) for _ in range(3))
        self.blocks = nn.Sequential(*layers)
        self.seen = nn.Parameter(torch.zeros(NUM_SAMPLES))

    def forward(self, samples: Tensor, numbers: Tensor) -> Tensor:
        return self.blocks(samples).square().mean() + self.seen[numbers].mean()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the model's output. Slow, so that a kill finds it at work, and by a random time, so that others wait."""
    value: Tensor = model(*batch)
    time.sleep(random.SystemRandom().uniform(0, float(os.environ.get("KILLS_PASS_SECONDS", PASS_SECONDS))))
    return value


def task() -> Task:
    """Return what is trained: `python:benchmarks/kills_task.py:task`."""
    return Task(
        model=Counting(),
        loss=loss,
        make_batch=lambda size: (torch.zeros(size, WIDTH), torch.zeros(size, dtype=torch.long)),
        dataset=Numbered(),
    )
