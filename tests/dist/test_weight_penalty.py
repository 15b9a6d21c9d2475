"""A backward that begins with a gradient: a penalty on the weights does not come through the model's outputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from training import line
from whole import whole

import shardwise
from shardwise import Plan


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def penalty(model: nn.Sequential, rank: int) -> Tensor:
    """Different on each rank, so that it has to be averaged."""
    first, second = model[0].weight, model[1].bias
    return (rank + 1) * (first.sum() + 2 * second.sum())


def together(loss: Tensor, other: Callable[[], Tensor]) -> None:
    (loss + other()).backward()


def penalty_first(loss: Tensor, other: Callable[[], Tensor]) -> None:
    other().backward()
    loss.backward()


def penalty_later(loss: Tensor, other: Callable[[], Tensor]) -> None:
    loss.backward()
    other().backward()


def train(rank: int, plan: Plan, run: Callable[..., None]) -> dict[str, Tensor]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shardwise.prepare(model, optimizer, plan)
    for step in range(2):
        inputs = torch.arange(8.0).view(2, 4) + step + rank
        run(model(inputs).square().mean(), lambda: penalty(model, rank))
        optimizer.step()
        optimizer.zero_grad()
    state: dict[str, Any] = shardwise.full_state_dict(model)
    return dict(state["model"])


def refuses(rank: int, plan: Plan) -> str:
    return line(lambda: train(rank, plan, penalty_later))


@pytest.mark.timeout(120)
@pytest.mark.ledger("penalty-first", outcome="right")
@pytest.mark.parametrize("strategy", ["ddp", "zero2", *whole("zero1")])
def test_a_penalty_whose_backward_comes_first_counts_as_in_one_loss(strategy: str) -> None:
    plan = Plan(strategy=strategy)
    expected = run_ranks(train, num_ranks=2, args=(plan, together))
    found = run_ranks(train, num_ranks=2, args=(plan, penalty_first))
    for ours, others in zip(found, expected, strict=True):
        for name, value in ours.items():
            torch.testing.assert_close(value, others[name], rtol=1e-6, atol=1e-6)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.timeout(120)
@pytest.mark.ledger("penalty-later", outcome="right", under=("zero2",))
def test_a_penalty_after_the_loss_counts_where_no_average_is_shown() -> None:
    plan = Plan(strategy="zero2")
    expected = run_ranks(train, num_ranks=2, args=(plan, together))
    found = run_ranks(train, num_ranks=2, args=(plan, penalty_later))
    for name, value in found[0].items():
        torch.testing.assert_close(value, expected[0][name], rtol=1e-6, atol=1e-6)


@pytest.mark.timeout(120)
@pytest.mark.ledger("penalty-later", outcome="refused")
@pytest.mark.parametrize("strategy", ["zero1", *whole("ddp")])
def test_a_penalty_on_top_of_averages_is_refused(strategy: str) -> None:
    for message in run_ranks(refuses, num_ranks=2, args=(Plan(strategy=strategy),)):
        assert "on top of gradients that are averaged already: add it to the loss" in message
