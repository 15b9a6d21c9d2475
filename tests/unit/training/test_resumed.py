"""A resumed run says that its steps are other steps, and what keeps them."""

from typing import Any

import pytest

from shardwise.training.config.config import TrainConfig
from shardwise.training.resumed import batch_line, rate_line


def config_of(**train: Any) -> TrainConfig:
    return TrainConfig.from_dict(
        {
            "task": {"model": "gpt-tiny"},
            "plan": {"micro_batch": 2},
            "train": {"steps": 100, **train},
            "run": {"folder": "run"},
        }
    )


@pytest.mark.parametrize(
    ("before", "now", "num_ranks", "keeps"),
    [
        (
            32,
            64,
            4,
            "plan.micro_batch × plan.accumulate = 8 keeps 32, and so does auto.global_batch = 32 with "
            "plan.strategy = 'auto', on any number of ranks that divides it",
        ),
        (32, 48, 3, "32 cannot be divided by 3 ranks: --ranks 2 or 4 keeps it"),
        (4, 10, 5, "4 cannot be divided by 5 ranks: --ranks 4 keeps it"),
    ],
)
def test_other_samples_per_step_are_said_with_what_keeps_them(
    before: int, now: int, num_ranks: int, keeps: str
) -> None:
    line = batch_line(before, now=now, num_ranks=num_ranks)
    assert line == f"samples per step: {before} → {now}, with the same learning rate; {keeps}"


@pytest.mark.parametrize("before", [None, 48])
def test_the_same_samples_per_step_need_no_line(before: int | None) -> None:
    assert batch_line(before, now=48, num_ranks=3) is None


def test_another_schedule_is_said_with_what_keeps_it() -> None:
    line = rate_line(config_of(), now=config_of(steps=200), step=50, num_steps=200)
    assert line == "learning rate of step 51: 5.00e-04 → 8.54e-04; --set train.steps=100 keeps the schedule"
    line = rate_line(config_of(), now=config_of(steps=200), step=100, num_steps=200)
    assert line == "the schedule of 100 steps had ended: learning rate 2.47e-07 → 5.00e-04"
    assert rate_line(config_of(), now=config_of(log_every=3), step=50, num_steps=100) is None
