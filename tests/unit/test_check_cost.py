"""benchmarks/check_cost.py: what it takes out of a step are the checks, all of them, and nothing else."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.plan import Plan

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """It imports its neighbour, as it does when it is run."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import check_cost

    return check_cost


@pytest.fixture(autouse=True)
def _job_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        _, self.optimizer = shardwise.prepare(self.model, optimizer, Plan(strategy="zero2", units="class:Linear"))

    def step(self) -> float:
        loss = self.model(torch.ones(2, 4)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def test_a_step_without_checks_is_the_same_step(script: ModuleType) -> None:
    with_checks = [training.step() for training in [Training()] for _ in range(6)]
    training = Training()
    losses = []
    for number in range(6):
        if number % 3:
            with script.without_checks(training.model):
                losses.append(training.step())
        else:
            losses.append(training.step())
    assert losses == with_checks


def test_every_check_runs_in_a_step_and_not_without(script: ModuleType) -> None:
    training = Training()
    training.step()
    seconds = dict.fromkeys(script.CHECKS, 0.0)
    with script.timed_checks(seconds):
        training.step()
    assert all(value > 0 for value in seconds.values())
    seconds = dict.fromkeys(script.CHECKS, 0.0)
    # Outermost, so that it is the functions that do nothing which would be timed.
    with script.timed_checks(seconds), script.without_checks(training.model):
        training.step()
    assert set(seconds.values()) == {0.0}


def test_the_interval_of_a_median_holds_it(script: ModuleType) -> None:
    found = script.interval_of_median([0.01 * number for number in range(101)])
    assert found["low"] < 0.5 < found["high"]
    assert script.interval_of_median([0.2] * 5) == {"low": 0.2, "high": 0.2}
