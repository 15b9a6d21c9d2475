"""The state of a training on this rank, which its loop and its update share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.optimizer.scaler import GradScaler
from shardwise.models.tasks import Task
from shardwise.training.config.config import TrainConfig
from shardwise.training.loading.sampler import DistributedSampler
from shardwise.training.loop.batches import Sharing
from shardwise.training.loop.nonfinite import FirstNonFinite

if TYPE_CHECKING:
    from shardwise.state.recovery.recovery import Recovery


@dataclass(slots=True, kw_only=True)
class Training:
    """The state of a training on this rank.

    step        the last step taken; `num_steps`: the last one to take
    update      takes a step: `update`, or that of another engine
    nonfinite   the source of a NaN or Inf in the steps that were not read yet
    recovery    keeps snapshots in memory, if the config asks for them
    tell        shows a line to the user, on rank 0
    """

    config: TrainConfig
    task: Task
    model: nn.Module
    optimizer: Optimizer
    scaler: GradScaler
    sampler: DistributedSampler
    sharing: Sharing
    batches: Iterator[Any]
    device: torch.device
    step: int
    num_steps: int
    update: "Update"
    nonfinite: FirstNonFinite | None = None
    recovery: "Recovery | None" = None
    tell: Callable[[str], None] = lambda line: None


Update = Callable[[Training, tuple[float, ...], list[Any]], tuple[Tensor, Tensor | None]]
"""(training, weights of the passes, their batches) → (loss, norm of the gradients).

The loss is this rank's part of the step's loss, times the number of ranks."""
