"""A task whose data hold up rank 1 once its third step is done, for ever: what test_watch.py trains."""

import os
import time

import torch
from torch import Tensor
from torch.utils.data import Dataset
from wrong import WIDTH, Blocks

from shardwise.models.tasks import Task


class Samples(Dataset[Tensor]):
    def __init__(self) -> None:
        self.num_read = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        self.num_read += 1
        if os.environ["RANK"] == "1" and self.num_read > 3 * 2:
            time.sleep(1000)
        return torch.zeros(WIDTH)


def make() -> Task:
    return Task(
        model=Blocks(),
        loss=lambda model, batch: model(batch).square().mean(),
        make_batch=lambda size: torch.zeros(size, WIDTH),
        dataset=Samples(),
    )
