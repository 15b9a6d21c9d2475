"""Training through a method other than `forward`."""

import copy

import pytest
import torch
from later import averaged_step, inputs, make_adam, make_late
from ranks import run_ranks
from torch import Tensor
from training import line, make_collectives

import shardwise
from shardwise.plan import Plan

METHODS = ("training_step", "through_forward")


def alone(rank: int, method: str) -> dict[str, Tensor]:
    model = make_late()
    optimizer = make_adam(model.parameters())
    for step in range(3):
        averaged_step(model, optimizer, lambda rank: getattr(model, method)(inputs(step, rank)))  # noqa: B023
    return dict(model.state_dict())


def trained(rank: int, method: str, strategy: str) -> dict[str, Tensor]:
    model = make_late()
    optimizer = make_adam(model.parameters())
    plan = Plan(strategy=strategy)
    shardwise.prepare(model, optimizer, plan, collectives=make_collectives(late=True, rank=rank))
    for _ in range(2):
        shardwise.forward_method(model, method)
    for step in range(3):
        getattr(model, method)(inputs(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    # The model itself can be called as well, and a copy knows nothing of it.
    with torch.no_grad():
        expected = model(inputs(9, 0))
        plain = copy.deepcopy(model)
        assert torch.equal(plain(inputs(9, 0)), expected)
        assert getattr(plain, method)(inputs(9, 0)) == getattr(model, method)(inputs(9, 0))
    getattr(plain, method)(inputs(9, 0)).backward()
    return shardwise.full_state_dict(model)["model"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("method", METHODS)
def test_another_method_trains_bit_equal_to_one_process(method: str, strategy: str) -> None:
    (expected,) = run_ranks(alone, num_ranks=1, args=(method,))
    for weights in run_ranks(trained, num_ranks=2, args=(method, strategy)):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def mistakes(rank: int) -> None:
    model = make_late()
    assert "has not been through shardwise.prepare" in line(lambda: shardwise.forward_method(model, "training_step"))
    shardwise.prepare(model, None, Plan())
    assert "has no method 'step'" in line(lambda: shardwise.forward_method(model, "step"))
    assert "has no method 'forward'" in line(lambda: shardwise.forward_method(model, "forward"))


@pytest.mark.timeout(60)
def test_a_method_that_is_not_there_is_refused() -> None:
    run_ranks(mistakes, num_ranks=1)
