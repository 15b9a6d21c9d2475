"""`train` with the optimizer `muon`: matrices are OWNED, and any number of ranks gives what one process gives."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from given_optimizers import tried_soon
from ranks import run_ranks
from train_tasks import assert_same_end, config, curve, reference, trained

from shardwise.training.config.config import TrainConfig


def asked(folder: Path, *, model: str = "gpt-tiny", steps: int = 4, ns_steps: int = 1, **plan: Any) -> TrainConfig:
    """One iteration, unless more is asked for: on a CPU without bf16 its products take a hundred times as long."""
    return config(
        folder,
        task={"model": model, **({"dataset": "stdlib", "seq": 8} if model == "gpt-tiny" else {})},
        plan=plan,
        optimizer={"name": "muon", "lr": 3e-3, "weight_decay": 0.1, "ns_steps": ns_steps},
        train={"steps": steps},
        checkpoint={"every": 2},
    )


@tried_soon
def trained_soon(rank: int, one: TrainConfig, crash_after: int | None) -> None:
    trained(rank, one, crash_after)


def run(one: TrainConfig, *, num_ranks: int = 2, crash_after: int | None = None) -> None:
    run_ranks(trained_soon, num_ranks=num_ranks, args=(one, crash_after))


def losses(folder: Path) -> list[float]:
    return [loss for _, loss, _ in curve(folder)]


def changed(folder: Path, *, model: str = "gpt-tiny") -> list[float]:
    """Losses of a run that crashes on two ranks after a checkpoint, and is resumed on one under another strategy."""
    run(asked(folder, model=model, strategy="fsdp"), crash_after=3)
    run(asked(folder, model=model, strategy="zero1", accumulate=2), num_ranks=1)
    return losses(folder)


def test_a_run_on_two_ranks_goes_on_on_one_under_another_strategy(tmp_path: Path) -> None:
    found = changed(tmp_path, model=reference("text_gpt"))
    assert len(found) == 4
    assert found[-1] < found[0]


@pytest.mark.whole
def test_and_has_the_losses_of_one_process_that_does_twice_the_passes(tmp_path: Path) -> None:
    """Which adds up gradients in another order."""
    run(asked(tmp_path / "one", strategy="ddp", accumulate=2), num_ranks=1)
    assert changed(tmp_path / "changed") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_two_ranks_give_the_bits_of_two_under_ddp(tmp_path: Path, strategy: str) -> None:
    for name in ("ddp", strategy):
        one = asked(tmp_path / name, strategy=name)
        run(replace(one, train=replace(one.train, clip_norm=0.0)))
    assert losses(tmp_path / strategy) == losses(tmp_path / "ddp")


@pytest.mark.whole
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_that_crashed_ends_as_one_that_did_not(tmp_path: Path, precision: str) -> None:
    plan = {"strategy": "zero2", "precision": precision}
    run(asked(tmp_path / "whole", **plan))
    for crash_after in (3, None):
        run(asked(tmp_path / "crashed", **plan), crash_after=crash_after)
    assert_same_end(tmp_path / "whole", tmp_path / "crashed")


@pytest.mark.whole
def test_the_loss_falls_at_a_learning_rate_that_adamw_would_have(tmp_path: Path) -> None:
    run(asked(tmp_path, steps=30, ns_steps=5, strategy="fsdp"))
    found = losses(tmp_path)
    assert found[0] > 5
    assert sum(found[-5:]) / 5 < 4.2
