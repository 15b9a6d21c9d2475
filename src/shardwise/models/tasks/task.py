"""A task: a model with its loss, its batches and, for training, its data; and the losses of our own models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from shardwise.base.errors import InvalidModel
from shardwise.models.own.lean_loss import lean_cross_entropy

Sums = Mapping[str, Tensor]
"""Sums over a batch by name, and under "count" the number of summands; a metric is sum / count.

Sums add up over batches and ranks of any size, averages do not.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model and everything that a command needs to train or measure it.

    loss(model, batch)       a scalar, the mean over the batch
    make_batch(size)         a batch of `size` samples of any values, for tracing and measuring
    dataset, eval_dataset    samples that torch's default collate can make into batches
    evaluate(model, batch)   sums over the batch
    weights                  values by parameter name, for a model on the meta device (shardwise.prepare)
    tokens_per_sample        of a batch of make_batch, by which the planner counts tokens; None if samples have none
    """

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    make_batch: Callable[[int], Any]
    dataset: Dataset[Any] | None = None
    eval_dataset: Dataset[Any] | None = None
    evaluate: Callable[[nn.Module, Any], Sums] | None = None
    weights: Mapping[str, Tensor] | None = None
    tokens_per_sample: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise InvalidModel(f"Task.model is a {type(self.model).__name__}; it must be an nn.Module")
        for name, required in (("loss", True), ("make_batch", True), ("evaluate", False)):
            value = getattr(self, name)
            if not callable(value) and (required or value is not None):
                raise InvalidModel(f"Task.{name} is a {type(value).__name__}; it must be a function")
        length = self.tokens_per_sample
        if length is not None and (not isinstance(length, int) or length < 1):
            raise InvalidModel(f"Task.tokens_per_sample is {length!r}; it must be a number of tokens, such as 2048")
        for name in ("dataset", "eval_dataset"):
            value = getattr(self, name)
            if value is not None and not (hasattr(value, "__getitem__") and hasattr(value, "__len__")):
                raise InvalidModel(f"Task.{name} must have a length and be indexed by sample (a map-style Dataset)")


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of (inputs, targets) over samples, or over tokens."""
    inputs, targets = batch
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def cross_entropy_of_tokens(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the same with less memory: the logits are overwritten."""
    inputs, targets = batch
    return lean_cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@torch.no_grad()
def classification_sums(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
    """Return the sums of loss and of correct answers, and their count, over samples or over tokens."""
    inputs, targets = batch
    logits = model(inputs).flatten(0, -2).float()
    targets = targets.flatten()
    return {
        "count": torch.tensor(float(targets.numel()), device=logits.device),
        "loss": F.cross_entropy(logits, targets, reduction="sum"),
        "accuracy": (logits.argmax(-1) == targets).float().sum(),
    }
