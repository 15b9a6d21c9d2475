"""A task: a model with its loss, its batches and, for training, its data. Every command takes one.

gpt2-124m                   a name of the catalogue (`shardwise models`)
python:FILE.py:function     your own: the function returns a Task; its arguments `seq` and `image`, if it has them, are
                            those of the command line
"""

import runpy
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from shardwise.data.source import Splits, image_splits, token_splits
from shardwise.errors import InvalidModel, ShardwiseError
from shardwise.models.catalogue import shape_of
from shardwise.models.lean_loss import lean_cross_entropy
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape, LlamaShape, ResNetShape, TokenShape, TransformersShape, ViTShape

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


def load_task(
    reference: str,
    *,
    dataset: str | None = None,
    seq: int | None = None,
    image: int | None = None,
    device: torch.device | str = "cpu",
) -> Task:
    """Return the task of a catalogue model, or of your own function.

    `dataset` is a spelling of data/source.py; without one the task has no data. `seq` and `image` change the catalogue
    model's sequence length and image size, or are arguments of your function. With `device="meta"` no weights are
    allocated.
    """
    if reference.startswith("python:"):
        if dataset is not None:
            raise InvalidModel(f"{reference}: --dataset is for catalogue models; this function sets its own")
        given = {"seq": seq, "image": image}
        return _own_task(reference, sizes={name: value for name, value in given.items() if value is not None})
    shape = shape_of(reference)
    for option, value in (("seq", seq), ("image", image)):
        if value is not None and value < 1:
            raise InvalidModel(f"--{option} {value}: must be at least 1")
    if isinstance(shape, TokenShape):
        if image is not None:
            raise InvalidModel(f"{reference} reads tokens: --image has no meaning; use --seq")
        if isinstance(shape, TransformersShape):
            from shardwise.transformers_task import transformers_task

            return transformers_task(shape, dataset=dataset, seq=seq, device=device)
        return token_task(shape, dataset=dataset, seq=seq, device=device)
    if seq is not None:
        raise InvalidModel(f"{reference} reads images: --seq has no meaning; use --image")
    shape = shape if image is None else replace(shape, image_size=image)
    return image_task(shape, dataset=dataset, device=device)


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


def _own_task(reference: str, *, sizes: Mapping[str, int]) -> Task:
    file, colon, function = reference.removeprefix("python:").rpartition(":")
    if not colon or not file or not function:
        raise InvalidModel(f"{reference}: must be python:FILE.py:function")
    if not Path(file).is_file():
        raise InvalidModel(f"{reference}: there is no file {file}")
    try:
        make = runpy.run_path(file, run_name=Path(file).stem).get(function)
        if not callable(make):
            raise InvalidModel(f"{reference}: {file} has no function {function}")
        for name in sizes.keys() - signature(make).parameters.keys():
            raise InvalidModel(f"{reference}: --{name} needs a function that takes it: def {function}({name}=…)")
        task = make(**sizes)
    except ShardwiseError:
        raise
    except Exception as error:  # whatever the user's own file raises
        raise InvalidModel(f"{reference}: {type(error).__name__}: {_where(error, file=file)}") from error
    if not isinstance(task, Task):
        raise InvalidModel(f"{reference}: returned a {type(task).__name__}; it must return a shardwise.Task")
    return task


def _where(error: Exception, *, file: str) -> str:
    """Return the error's message and the last line of the user's file in its traceback."""
    if isinstance(error, SyntaxError):
        return str(error)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = f" ({Path(file).name}, line {lines[-1]})" if lines else ""
    return " ".join(str(error).split()) + place
