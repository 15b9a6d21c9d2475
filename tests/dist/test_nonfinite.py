"""A NaN in one sample: what train.nonfinite says is done on all ranks, and no good checkpoint is lost."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset
from train_tasks import config, lines
from whole import whole

from reliability.said import say
from shardwise.base.errors import ShardwiseError
from shardwise.models.tasks import Task
from shardwise.training.config.config import TrainConfig
from shardwise.training.loop.nonfinite import find_first_nonfinite
from shardwise.training.rank_run import train


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


class FailingBlock(nn.Module):
    """A linear layer whose output, or gradient, on one rank is not finite in step 3; it counts its own steps."""

    def __init__(self, *, output: bool = False, gradient: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.output, self.gradient = output, gradient
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        out = self.linear(x)
        fails = self.num_calls >= 3 and dist.get_rank() == 1
        if fails and self.output:
            return out / 0.0
        if fails and self.gradient:
            # 0 in the forward, and the gradient of √0 in the backward.
            out = out + (out * 0).square().sum().sqrt()
        return out


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stack(**fails: bool) -> Task:
    blocks = [FailingBlock(**(fails if number == 2 else {})) for number in range(4)]
    return Task(
        model=Stack(*blocks),
        loss=lambda model, batch: model(torch.nan_to_num(batch)).square().mean(),
        make_batch=lambda size: torch.zeros(size, 4),
        dataset=Samples(),
    )


def bad_output() -> Task:
    return stack(output=True)


def bad_gradient() -> Task:
    return stack(gradient=True)


def bad_loss() -> Task:
    """Finite outputs, and a loss that is not."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(torch.nan_to_num(batch)) * 0).sum().log()

    return replace(stack(), loss=loss)


def asked(folder: Path, *, steps: int = 12, function: str = "task", clip_norm: float = 1.0, **more: Any) -> TrainConfig:
    return config(
        folder,
        task={"model": f"python:{__file__}:{function}"},
        plan={"micro_batch": 1, "strategy": more.pop("strategy", "fsdp"), "units": "none", **more.pop("plan", {})},
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
@pytest.mark.parametrize("strategy", ["zero2", "fsdp", *whole("ddp")])
def test_a_nan_on_one_rank_stops_all_ranks_before_a_checkpoint_and_is_named(tmp_path: Path, strategy: str) -> None:
    for line, _ in run_ranks(ended, num_ranks=2, args=(asked(tmp_path, strategy=strategy),)):
        assert say(line).startswith(
            "NonFinite: step 7: loss nan, gradient norm nan on rank 1, first in the batch; nothing "
        )
        assert "train.nonfinite" in line
        assert "\n" not in line
    assert saved(tmp_path) == {4: True, 6: True}
    assert lines(tmp_path)[-1]["loss"] is None


@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_a_skipped_step_leaves_the_weights_finite_and_is_named(tmp_path: Path, clip_norm: float) -> None:
    (_, told), (_, quiet) = run_ranks(
        ended, num_ranks=2, args=(asked(tmp_path, nonfinite="skip", clip_norm=clip_norm),)
    )
    assert told == [
        "NaN or Inf in step 7: loss nan, gradient norm nan on rank 1, first in the batch; 1 of 2 steps were skipped"
    ]
    assert quiet == []
    assert saved(tmp_path) == {10: True, 12: True}
    assert [line["step"] for line in lines(tmp_path) if line["loss"] is None] == [7]


@pytest.mark.ledger("nan-checkpoints", outcome="right")
def test_where_training_goes_on_the_last_checkpoint_with_finite_weights_stays(tmp_path: Path) -> None:
    (_, told), _ = run_ranks(ended, num_ranks=2, args=(asked(tmp_path, nonfinite="warn"),))
    unknown = "in a module that is not known (train.nonfinite = skip looks for it)"
    assert say(told[0]) == f"NaN or Inf in step 7: loss nan, gradient norm nan on rank 1, {unknown}"
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
        assert "gradient norm nan, with a finite loss on every rank, first in the gradient of " in line
        assert "on rank 0, 1;" in line


ENGINES = [("shardwise", "ddp"), ("shardwise", "fsdp"), ("torch", "ddp"), ("torch", "fsdp")]


@pytest.mark.ledger("nan-unit", outcome="refused")
@pytest.mark.parametrize(("engine", "strategy"), ENGINES)
@pytest.mark.parametrize("policy", ["stop", *whole("skip")])
@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("bad_output", " on rank 1, first in blocks.2 (its output)"),
        (
            "bad_gradient",
            ", with a finite loss on every rank, first in the gradient of blocks.2.linear.bias on rank 1",
        ),
    ],
)
def test_the_first_module_and_its_rank_are_named(
    tmp_path: Path, engine: str, strategy: str, policy: str, function: str, says: str
) -> None:
    plan = {"units": "auto", "engine": engine, "strategy": strategy}
    asked_for = asked(tmp_path, steps=4, function=function, nonfinite=policy, plan=plan)
    ends = run_ranks(ended, num_ranks=2, args=(asked_for,))
    told = [line for line, _ in ends] if policy == "stop" else ends[0][1]
    assert told
    for line in told:
        assert "step 3: loss " in say(line)
        assert says in line
        assert "\n" not in line


def test_a_loss_that_is_not_finite_after_finite_outputs_is_named(tmp_path: Path) -> None:
    for line, _ in run_ranks(ended, num_ranks=2, args=(asked(tmp_path, steps=4, function="bad_loss"),)):
        assert line.startswith("NonFinite: step 1: loss -inf")
        assert "on rank 0, 1, first in the loss (the model's output is finite)" in line


class Masked(nn.Module):
    """Random numbers, running statistics, and a mask of -Inf, which is no fault."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout, self.mask = nn.BatchNorm1d(4), nn.Dropout(0.5), FullMask()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.dropout(self.norm(x))) + self.mask(x).exp()


class FullMask(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x, -torch.inf)


def looks(rank: int) -> tuple[str | None, tuple[int, ...]]:
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))

    def run_again() -> Tensor:
        loss = model(batch).sum() * (torch.inf if rank == 1 else 1)
        loss.backward()
        return loss.detach()

    before = torch.get_rng_state(), model.norm.running_mean.clone(), model.norm.num_batches_tracked.clone()
    found = find_first_nonfinite(
        model, optimizer, step=1, batches=[batch], device=torch.device("cpu"), run_again=run_again
    )
    after = torch.get_rng_state(), model.norm.running_mean, model.norm.num_batches_tracked
    assert all(map(torch.equal, before, after))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return found.place, found.ranks


def test_a_look_changes_neither_random_numbers_nor_statistics_and_takes_no_mask_for_a_fault() -> None:
    for place, ranks in run_ranks(looks, num_ranks=2):
        assert place == "the loss (the model's output is finite)"
        assert ranks == (1,)
