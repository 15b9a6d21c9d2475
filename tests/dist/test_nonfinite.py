"""A NaN in one sample: what train.nonfinite says is done on all ranks, and no good checkpoint is lost."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset
from train_tasks import config, lines

from reliability.said import say
from shardwise.errors import ShardwiseError
from shardwise.tasks import Task
from shardwise.train.config import TrainConfig
from shardwise.train.rank_run import train


class Samples(Dataset[Tensor]):
    """Sample 13 is NaN: in the order of indices, with 2 samples per step, that is step 7, rank 1 of 2."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        sample = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return sample * float("nan") if index == 13 else sample


def task() -> Task:
    return Task(
        model=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)),
        loss=lambda model, batch: model(batch).square().mean(),
        make_batch=lambda size: torch.zeros(size, 4),
        dataset=Samples(),
    )


def square_root() -> Task:
    """Its loss is finite, and the gradient is not: that of √0."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        return out.square().mean() + (out.sum() * 0).abs().sqrt()

    return Task(model=nn.Linear(4, 2), loss=loss, make_batch=lambda size: torch.zeros(size, 4), dataset=Samples())


def asked(folder: Path, *, steps: int = 12, function: str = "task", clip_norm: float = 1.0, **more: Any) -> TrainConfig:
    return config(
        folder,
        task={"model": f"python:{__file__}:{function}"},
        plan={"micro_batch": 1, "strategy": more.pop("strategy", "fsdp"), "units": "none"},
        data={"shuffle": False},
        train={"steps": steps, "log_every": 4, "clip_norm": clip_norm, **more},
        checkpoint={"every": 2, "keep": 2},
    )


def ended(rank: int, config: TrainConfig) -> tuple[str, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            train(config)
        except ShardwiseError as error:
            return f"{type(error).__name__}: {error}", []
    return "", [str(item.message) for item in caught if "NaN" in str(item.message)]


def saved(folder: Path) -> dict[int, bool]:
    """Step of each checkpoint → whether its weights are finite, by its manifest."""
    manifests = [
        json.loads(path.read_bytes()) for path in sorted((folder / "checkpoints").glob("step-*/manifest.json"))
    ]
    contents = [manifest["body"]["contents"] for manifest in manifests]
    return {found["step"]: found.get("finite", True) for found in contents}


@pytest.mark.ledger("nan-on-one-rank", outcome="refused")
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
def test_a_nan_on_one_rank_stops_all_ranks_before_a_checkpoint_and_is_named(tmp_path: Path, strategy: str) -> None:
    for line, _ in run_ranks(ended, num_ranks=2, args=(asked(tmp_path, strategy=strategy),)):
        assert say(line).startswith("NonFinite: step 7: loss nan, gradient norm nan on rank 1; nothing was saved since")
        assert "train.nonfinite" in line
        assert "\n" not in line
    assert saved(tmp_path) == {4: True, 6: True}
    assert lines(tmp_path)[-1]["loss"] is None


@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_a_skipped_step_leaves_the_weights_finite_and_is_named(tmp_path: Path, clip_norm: float) -> None:
    (_, told), (_, quiet) = run_ranks(
        ended, num_ranks=2, args=(asked(tmp_path, nonfinite="skip", clip_norm=clip_norm),)
    )
    assert told == ["NaN or Inf in step 7: loss nan, gradient norm nan on rank 1; 1 of 2 steps were skipped"]
    assert quiet == []
    assert saved(tmp_path) == {10: True, 12: True}
    assert [line["step"] for line in lines(tmp_path) if line["loss"] is None] == [7]


@pytest.mark.ledger("nan-checkpoints", outcome="right")
def test_where_training_goes_on_the_last_checkpoint_with_finite_weights_stays(tmp_path: Path) -> None:
    (_, told), _ = run_ranks(ended, num_ranks=2, args=(asked(tmp_path, nonfinite="warn"),))
    assert say(told[0]) == "NaN or Inf in step 7: loss nan, gradient norm nan on rank 1"
    assert saved(tmp_path) == {6: True, 10: False, 12: False}


def test_weights_that_are_not_finite_are_not_saved_also_where_no_norm_is_measured(tmp_path: Path) -> None:
    """One step: the loss is finite, and nobody reads another one before the end."""
    asked_for = asked(tmp_path, steps=1, function="square_root", clip_norm=0.0)
    for line, _ in run_ranks(ended, num_ranks=2, args=(asked_for,)):
        assert line.startswith("CheckpointError: step 1 is not saved: on rank 0 weight holds a NaN or Inf")
    assert saved(tmp_path) == {}


def test_a_gradient_that_is_not_finite_under_a_finite_loss_is_named(tmp_path: Path) -> None:
    for line, _ in run_ranks(ended, num_ranks=2, args=(asked(tmp_path, function="square_root"),)):
        assert line.startswith("NonFinite: step 1: loss ")
        assert "gradient norm nan, with a finite loss on every rank" in line
