"""Where a plan does not capture, the step is the step. What a captured one does needs a GPU: tests/gpu."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import Plan
from shardwise.errors import InvalidModel, InvalidPlan


@pytest.fixture(autouse=True)
def group() -> object:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def step() -> None: ...


@pytest.mark.parametrize("engine", ["shardwise", "torch"])
def test_a_plan_that_does_not_capture_leaves_the_step_alone(engine: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = shardwise.prepare(model, optimizer, Plan(engine=engine))
    assert shardwise.capture(step, prepared, optimizer) is step


def test_a_model_that_was_not_prepared_is_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(InvalidModel, match="shardwise.prepare"):
        shardwise.capture(step, model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_without_a_gpu_a_plan_that_captures_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="only a CUDA device can capture a step"):
        shardwise.prepare(nn.Linear(4, 4), None, Plan(capture=True))
