"""Small tasks of a user's own, as `python:FILE.py:function` names them, and configs and bodies of ranks that train them."""

import json
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import Dataset

from shardwise.checkpoint import Checkpoints, open_checkpoint
from shardwise.models.catalogue import CATALOGUE
from shardwise.models.shapes import GPTShape, ViTShape
from shardwise.models.tasks import Task, image_task, token_task
from shardwise.training.config.config import TrainConfig
from shardwise.training.loading.sampler import DistributedSampler
from shardwise.training.loop.metrics import StepMetrics
from shardwise.training.rank_run import Outcome, train


def reference(function: str) -> str:
    return f"python:{__file__}:{function}"


# With dropout, so that random numbers matter.
GPT = GPTShape(num_layers=2, width=16, num_heads=2, vocab_size=256, max_seq=8, dropout=0.1)


def gpt() -> Task:
    return replace(token_task(GPT, dataset="random"), eval_dataset=Numbers(256, length=9))


def text_gpt() -> Task:
    """Of text, which can be learned."""
    return token_task(replace(GPT, dropout=0.0), dataset="stdlib")


def noisy_gpt() -> Task:
    """Each sample is drawn anew whenever it is read."""
    return replace(gpt(), dataset=Noise(256, length=36))


class Noise(Dataset[tuple[Tensor, Tensor]]):
    """A sample's own token, and random ones after it."""

    def __init__(self, num_values: int, *, length: int) -> None:
        self._num_values = num_values
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(self._num_values, (9,))
        tokens[0] = index
        return tokens[:-1], tokens[1:]


def resnet() -> Task:
    """With BatchNorm, whose statistics a forward changes."""
    shape = CATALOGUE["resnet-digits"]
    return image_task(shape, dataset="digits")


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """A few samples of tokens."""

    def __init__(self, num_values: int, *, length: int) -> None:
        self._tokens = torch.arange(length * 9).view(length, 9) % num_values

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._tokens[index, :-1], self._tokens[index, 1:]


def vit() -> Task:
    """Larger patches, fewer layers and larger weights at the start than vit-digits: it learns in seconds."""
    shape = CATALOGUE["vit-digits"]
    assert isinstance(shape, ViTShape)
    task = image_task(replace(shape, num_layers=2, patch_size=4), dataset="digits")
    with torch.no_grad():
        for name, parameter in task.model.named_parameters():
            if parameter.dim() >= 2 and not name.startswith("embed.project"):
                parameter *= shape.width**-0.5 / 0.02
    return task


NUM_ENTRIES = 15


class Table(nn.Module):
    """A number for each sample. A sample's gradient touches its own number alone, so the numbers say who was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = nn.Parameter(torch.zeros(NUM_ENTRIES))

    def forward(self, indices: Tensor) -> Tensor:
        return self.entries[indices]


class Indices(Dataset[Tensor]):
    def __len__(self) -> int:
        return NUM_ENTRIES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


def table() -> Task:
    return Task(
        model=Table(),
        loss=lambda model, indices: model(indices).mean(),
        make_batch=lambda size: torch.zeros(size, dtype=torch.long),
        dataset=Indices(),
        eval_dataset=Indices(),
        evaluate=lambda model, indices: {"count": torch.tensor(float(len(indices))), "index": indices.sum()},
    )


def config(folder: Path, **sections: dict[str, Any]) -> TrainConfig:
    """A config of the tiny GPT; each section's keys are added to those here, or replace them."""
    data: dict[str, dict[str, Any]] = {
        "task": {"model": reference("gpt")},
        "plan": {"micro_batch": 2},
        "optimizer": {"lr": 1e-2},
        "train": {"log_every": 1, "eval_every": 0},
        "checkpoint": {"every": 5, "asynchronous": False},
        "run": {"folder": str(folder), "tensorboard": False},
    }
    for name, keys in sections.items():
        data[name] = {**data.get(name, {}), **keys}
    return TrainConfig.from_dict(data)


class Crash(Exception):  # noqa: N818
    """What `crash_after` raises in the middle of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a body ended: the run's outcome, or None after a crash, and the steps that `on_step` saw."""

    outcome: Outcome | None
    seen: list[StepMetrics]


def trained(rank: int, asked: TrainConfig, crash_after: int | None = None) -> Ended:
    """The body of a rank; all ranks crash after the same step."""
    seen: list[StepMetrics] = []

    def on_step(metrics: StepMetrics) -> None:
        seen.append(metrics)
        if metrics.step == crash_after:
            raise Crash

    try:
        return Ended(outcome=train(asked, on_step=on_step, console=Console(quiet=True)), seen=seen)
    except Crash:
        return Ended(outcome=None, seen=seen)


def lines(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path) -> list[tuple[int, float, float | None]]:
    """What must be the same, bit for bit, however often a run was interrupted."""
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines(folder)]


def tensors(folder: Path) -> dict[str, Tensor]:
    """Everything in the newest checkpoint, by file and name."""
    newest = max((folder / "checkpoints").glob("step-*"))
    files = sorted(newest.glob("*.safetensors"))
    return {f"{path.name}/{name}": value for path in files for name, value in load_file(path).items()}


def assert_same_end(one: Path, other: Path) -> None:
    """The same losses in every step, and the same weights, optimizer and random states in the end."""
    assert curve(one) == curve(other)
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    assert ours
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def assert_seen_once_per_epoch(folder: Path, *, num_epochs: int) -> None:
    """A finished run of `table` under SGD with a rate of 1: its weights are those of all samples, once per epoch.

    A sample moves its own entry by 1 / samples of the step, and steps may differ in size; so the entries must be what
    the order of the samples, dealt out to the steps that metrics.jsonl names, gives.
    """
    written = lines(folder)
    order = list(islice(DistributedSampler(NUM_ENTRIES, endless=True), num_epochs * NUM_ENTRIES))
    for epoch in range(num_epochs):
        seen = order[epoch * NUM_ENTRIES : (epoch + 1) * NUM_ENTRIES]
        assert sorted(seen) == list(range(NUM_ENTRIES))
    assert [line["step"] for line in written] == list(range(1, len(written) + 1))
    assert sum(line["num_samples"] for line in written) == len(order)
    assert (written[-1]["epoch"], written[-1]["position"]) == (num_epochs, 0)
    expected = torch.zeros(NUM_ENTRIES)
    samples = iter(order)
    for line in written:
        for sample in islice(samples, line["num_samples"]):
            expected[sample] -= 1 / line["num_samples"]
    model = Table()
    saved = open_checkpoint(max((folder / "checkpoints").glob("step-*")))
    Checkpoints(folder / "checkpoints").load(saved, model)
    torch.testing.assert_close(model.entries.detach(), expected, atol=1e-6, rtol=0)
