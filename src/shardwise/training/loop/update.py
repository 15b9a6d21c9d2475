"""One optimizer step of a training on this rank: its batches and passes, and the update."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.training.loop.batches import samples_seen, to_device
from shardwise.training.loop.nonfinite import FirstNonFinite, find_first_nonfinite
from shardwise.training.loop.training_state import Training
from shardwise.training.loop.training_step import Pass, run_passes, run_step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPasses:
    """The weight and the batch of each pass of a step on this rank, and the number of samples on all ranks."""

    weights: tuple[float, ...]
    batches: list[Any]
    num_samples: int


def next_passes(training: Training) -> StepPasses:
    """Read the batches of the next step; the sampler does not advance."""
    sharing = training.sharing
    share = sharing.share(samples_seen(training.sampler))
    assert share is not None
    batches = [next(training.batches) for _ in share.counts]
    weights = tuple(share.weight(count, num_ranks=sharing.num_ranks) for count in share.counts)
    return StepPasses(weights=weights, batches=batches, num_samples=share.num_samples)


def update(training: Training, weights: tuple[float, ...], batches: list[Any]) -> tuple[Tensor, Tensor | None]:
    """Take a step; the update is left out if train.nonfinite says so."""
    policy, clip_norm = training.config.train.nonfinite, training.config.train.clip_norm
    # With fp16 the scaler skips steps itself.
    skips = policy == "skip" and not training.scaler.is_enabled()
    # The norm is the same on every rank. On a GPU the CPU waits for it only in order to skip.
    checks = skips or (policy == "stop" and training.device.type == "cpu" and not training.scaler.is_enabled())
    passes = forwards(training, weights, batches)

    def accepts(grad_norm: Tensor) -> bool:
        if not checks or bool(grad_norm.isfinite()):
            return True
        if training.nonfinite is None:
            training.nonfinite = _find_first_nonfinite(training, passes, batches)
        return False

    losses, grad_norm = run_step(
        training.model,
        training.optimizer,
        passes,
        scaler=training.scaler,
        max_norm=clip_norm or (math.inf if skips else None),
        accepts=accepts,
    )
    return sum(losses, start=torch.zeros((), device=training.device)), grad_norm


def forwards(training: Training, weights: tuple[float, ...], batches: list[Any]) -> list[Pass]:
    """Return the passes of a step, for `run_step` and `run_passes`."""

    def forward(weight: float, batch: Any) -> Tensor:
        return training.task.loss(training.model, to_device(batch, training.device)) * weight

    return [partial(forward, weight, batch) for weight, batch in zip(weights, batches, strict=True)]


def _find_first_nonfinite(training: Training, passes: list[Pass], batches: list[Any]) -> FirstNonFinite:
    # The passes that run again would add to the gradients.
    training.optimizer.zero_grad()
    return find_first_nonfinite(
        training.task.model,
        training.optimizer,
        step=training.step,
        batches=batches,
        device=training.device,
        run_again=partial(run_passes, training.model, passes, scaler=training.scaler),
    )
