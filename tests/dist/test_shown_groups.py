"""Param groups that show the model's own parameters for the length of a block, as frameworks' callbacks look for them."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from training import line
from whole import whole

import shardwise
from shardwise.engine.engine import engine_of
from shardwise.plan import Plan


def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3))
    model[0].requires_grad_(False)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def batch(step: int, rank: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, 10 + step).outer(torch.arange(1.0, 6.0)).sin()[rank::2][:4]


def trained(ranks: tuple[int, ...], model: Any, optimizer: Any, *, showing: Any) -> dict[str, Tensor]:
    for step in range(6):
        if step == 3:
            model[0].requires_grad_(True)
            with showing(optimizer):
                held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
                new = [parameter for parameter in model.parameters() if id(parameter) not in held]
                assert len(new) == 2
                optimizer.add_param_group({"params": new, "lr": 0.05})
                assert optimizer.param_groups[1]["params"] == new
            with showing(optimizer):
                # As a checkpoint's groups are restored.
                optimizer.param_groups = [
                    {**group, "params": list(group["params"])} for group in optimizer.param_groups
                ]
        for rank in ranks:
            (model(batch(step, rank)).square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def differs(rank: int, strategy: str) -> float:
    expected = trained((0, 1), *make(), showing=lambda optimizer: nullcontext())
    model, optimizer = make()
    shardwise.prepare(model, optimizer, Plan(strategy=strategy, units="leaf"))
    found = trained((rank,), model, optimizer, showing=engine_of(model).owned.showing_parameters)
    assert optimizer.state_dict()["param_groups"][1]["params"] == [4, 5]
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


@pytest.mark.parametrize("strategy", ["zero2", "fsdp", *whole("ddp", "zero1")])
def test_groups_that_are_extended_and_replaced_while_shown_train_bit_equal_to_one_process(strategy: str) -> None:
    assert run_ranks(differs, num_ranks=2, args=(strategy,)) == [0.0, 0.0]


def refused(rank: int) -> tuple[str, bool]:
    model, optimizer = make()
    shardwise.prepare(model, optimizer, Plan(strategy="zero2", units="leaf"))
    stepped = [list(map(id, group["params"])) for group in optimizer.param_groups]

    def add() -> None:
        with engine_of(model).owned.showing_parameters(optimizer):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})

    return line(add), stepped == [list(map(id, group["params"])) for group in optimizer.param_groups]


def test_a_foreign_parameter_is_refused_and_the_groups_stay_as_they_were() -> None:
    for said, stays in run_ranks(refused, num_ranks=2):
        assert "shape (3,): it is not the prepared model's" in said
        assert stays
