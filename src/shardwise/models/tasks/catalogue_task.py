"""Tasks of the catalogue's own models: next-token prediction and image classification."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.models.data.source import Splits, image_splits, token_splits
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape, LlamaShape, ResNetShape, ViTShape
from shardwise.models.tasks.task import Task, classification_sums, cross_entropy, cross_entropy_of_tokens


def token_task(
    shape: GPTShape | LlamaShape,
    *,
    dataset: str | None = None,
    seq: int | None = None,
    device: torch.device | str = "cpu",
) -> Task:
    """Return a task of next-token prediction. A `seq` longer than the shape's own enlarges the shape."""
    seq = seq or shape.max_seq
    if seq > shape.max_seq:
        shape = replace(shape, max_seq=seq)

    def make_batch(size: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(shape.vocab_size, (size, seq + 1), device=device)
        return tokens[:, :-1], tokens[:, 1:]

    splits = dataset and token_splits(dataset, seq=seq, vocab_size=shape.vocab_size)
    task = _task(build_model(shape, device=device), splits=splits or None, make_batch=make_batch)
    return replace(task, loss=cross_entropy_of_tokens, tokens_per_sample=seq)


def image_task(
    shape: ViTShape | ResNetShape, *, dataset: str | None = None, device: torch.device | str = "cpu"
) -> Task:
    """Return a task of image classification."""

    def make_batch(size: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(size, shape.num_channels, shape.image_size, shape.image_size, device=device)
        return images, torch.randint(shape.num_classes, (size,), device=device)

    splits = dataset and image_splits(
        dataset,
        image_size=shape.image_size,
        num_channels=shape.num_channels,
        num_classes=shape.num_classes,
    )
    return _task(build_model(shape, device=device), splits=splits or None, make_batch=make_batch)


def _task(model: nn.Module, *, splits: Splits | None, make_batch: Callable[[int], Any]) -> Task:
    return Task(
        model=model,
        loss=cross_entropy,
        make_batch=make_batch,
        dataset=splits.training if splits else None,
        eval_dataset=splits.evaluation if splits else None,
        evaluate=classification_sums,
    )
