"""Tasks of language models of the transformers library: next-token prediction with the usual loss."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.base.errors import InvalidData, InvalidModel
from shardwise.models.catalogue import default_seq
from shardwise.models.data.source import token_splits
from shardwise.models.hub_cache import config_folder
from shardwise.models.make import build_model
from shardwise.models.shapes import TransformersShape
from shardwise.models.tasks.task import Sums, Task
from shardwise.models.transformers_model import config_of_folder, model_of_config


def transformers_task(
    shape: TransformersShape, *, dataset: str | None = None, seq: int | None = None, device: torch.device | str = "cpu"
) -> Task:
    """Return the task of a catalogue model."""
    task = task_of_model(build_model(shape, device=device), seq=seq or shape.max_seq)
    return with_data(task, dataset, seq=seq or shape.max_seq, vocab_size=shape.vocab_size)


def folder_task(name: str, *, seq: int | None, image: int | None) -> Task:
    """Return the task of a model on the meta device, by its folder, its config.json or its name on the hub."""
    folder = config_folder(name)
    if image is not None:
        raise InvalidModel(f"hf:{name} reads tokens: --image has no meaning; use --seq")
    config = config_of_folder(folder)
    with torch.device("meta"):
        model = model_of_config(config)
    return task_of_model(model, seq=seq or default_seq(getattr(config, "max_position_embeddings", None)))


def task_of_model(model: nn.Module, *, seq: int) -> Task:
    def make_batch(size: int) -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(size, seq, dtype=torch.int64)
        return tokens, tokens

    return Task(
        model=model,
        loss=cross_entropy_of_logits,
        make_batch=make_batch,
        evaluate=sums_of_logits,
        tokens_per_sample=seq,
    )


def with_data(task: Task, dataset: str | None, *, seq: int, vocab_size: int, tokenizer: Path | None = None) -> Task:
    """Return the task with the splits of a dataset of tokens."""
    if dataset is None:
        return task
    if type(task.model).__name__.endswith("ForMaskedLM"):
        raise InvalidData(
            f"{type(task.model).__name__} fills in masked tokens, for which no dataset masks any: "
            "train it with a python: task"
        )
    splits = token_splits(dataset, seq=seq, vocab_size=vocab_size, tokenizer=tokenizer)
    return replace(task, dataset=splits.training, eval_dataset=splits.evaluation)


def cross_entropy_of_logits(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy over tokens, in fp32, as transformers computes it."""
    inputs, targets = batch
    return F.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def sums_of_logits(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Sums:
    inputs, targets = batch
    logits, targets = model(input_ids=inputs).logits.flatten(0, 1).float(), targets.flatten()
    counted = targets != -100
    return {
        "count": counted.sum().float(),
        "loss": F.cross_entropy(logits, targets, reduction="sum"),
        "accuracy": (logits.argmax(-1) == targets).float().sum(),
    }
