"""A small task that breaks if it is told to: POINT and RANK_TO_BREAK in the environment say where and on which rank."""

import errno
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import Dataset

from shardwise.models.tasks import Task
from shardwise.state.checkpoint.disk import Disk

POINT = os.environ.get("POINT") if os.environ.get("RANK") == os.environ.get("RANK_TO_BREAK") else None
IS_FIRST_START = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"


def break_at(point: str) -> None:
    if point == POINT:
        raise ValueError(f"broken in {point}")


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        break_at("the data")
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        break_at("backward")
        return grad


class Block(nn.Module):
    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.breaks = breaks
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.breaks and self.num_calls == 3:
            break_at("forward")
            # Not where the planner traces the model, to find out what would fit.
            if (POINT == "memory" and type(x) is Tensor) or (POINT == "memory once" and IS_FIRST_START):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return Breaks.apply(self.linear(x)) if self.breaks else self.linear(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        break_at("the model")
        self.blocks = nn.Sequential(Block(breaks=False), Block(breaks=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


def make() -> Task:
    # By the number of restarts: the disk is full in the first start, fails in the second, and is good in the third.
    disk_error = {"0": errno.ENOSPC, "1": errno.EIO}.get(os.environ.get("TORCHELASTIC_RESTART_COUNT", ""))
    if POINT == "the disk" and disk_error is not None:

        def fail(self: Disk, *args: Any, **kwargs: Any) -> None:
            raise OSError(disk_error, os.strerror(disk_error))

        Disk.write = fail  # type: ignore[method-assign]
    if POINT == "the optimizer":
        register_optimizer_step_pre_hook(lambda *args: break_at("the optimizer"))
    return Task(
        model=Model(),
        loss=lambda model, batch: model(batch),
        make_batch=lambda size: torch.zeros(size, 4),
        dataset=Samples(),
    )
