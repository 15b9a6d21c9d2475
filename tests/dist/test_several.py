"""Several models in one job: what they share is trained as in one process."""

import pytest
import torch
from ranks import run_ranks
from several import NUM_STEPS, SCHEDULES, loss_of, make_optimizers, make_pair, trained_in_one_process
from torch import Tensor, nn
from training import line, make_collectives
from whole import in_turn, whole

import shardwise
from shardwise.plan import Plan

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")


def alone(rank: int, schedule: str) -> dict[str, Tensor]:
    return trained_in_one_process(schedule)


def trained(rank: int, plan: Plan, schedule: str) -> dict[str, Tensor]:
    models = make_pair()
    optimizers = make_optimizers(models)
    collectives = make_collectives(late=True, rank=rank)
    shardwise.prepare(models, list(optimizers.values()), plan, collectives=collectives)
    for step in range(NUM_STEPS):
        passes = SCHEDULES[schedule](step)
        losses = [sum(loss_of(models, name, step=step, rank=rank) for name in names) for names in passes]
        for loss in losses:
            loss.backward()
        for name in dict.fromkeys(name for names in passes for name in names):
            optimizers[name].step()
        models.zero_grad()
    return shardwise.full_state_dict(models)["model"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("schedule", "strategy"),
    [
        *in_turn(["sum", "turns", "apart"], "fsdp", "zero2", every=STRATEGIES),
    ],
)
def test_two_models_that_share_an_encoder_are_bit_equal_to_one_process(schedule: str, strategy: str) -> None:
    (expected,) = run_ranks(alone, num_ranks=1, args=(schedule,))
    for weights in run_ranks(trained, num_ranks=2, args=(Plan(strategy=strategy), schedule)):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("schedule", ["sum", *whole("turns", "apart")])
def test_they_are_also_where_units_are_recomputed(schedule: str) -> None:
    (expected,) = run_ranks(alone, num_ranks=1, args=(schedule,))
    for weights in run_ranks(trained, num_ranks=2, args=(Plan(strategy="fsdp", recompute="full"), schedule)):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())


def evaluates(rank: int, strategy: str) -> None:
    models = make_pair()
    with torch.no_grad():
        expected = {name: loss_of(models, name, step=0, rank=rank) for name in models}
    shardwise.prepare(models, None, Plan(strategy=strategy))
    with torch.no_grad():
        for name, value in expected.items():
            assert torch.equal(loss_of(models, name, step=0, rank=rank), value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["zero2", "fsdp", *whole("ddp", "zero1")])
def test_each_of_them_can_be_evaluated(strategy: str) -> None:
    run_ranks(evaluates, num_ranks=2, args=(strategy,))


def inside(rank: int) -> None:
    """The encoder is in the ModuleDict, too: it is called by the other, and is no model of its own."""
    pair = make_pair()
    models = nn.ModuleDict({"encoder": pair["one"].encoder, "one": pair["one"]})
    optimizer = torch.optim.SGD(models.parameters(), lr=0.1)
    shardwise.prepare(models, optimizer, Plan(strategy="zero2"))
    loss_of(models, "one", step=0, rank=rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    refused = line(lambda: models["encoder"](torch.ones(2, 5)).sum().backward())
    assert refused.startswith("a backward without a forward of the model")


@pytest.mark.timeout(60)
def test_a_model_inside_another_one_is_called_by_that() -> None:
    run_ranks(inside, num_ranks=2)


def on_torch(rank: int) -> None:
    models = make_pair()
    optimizers = list(make_optimizers(models).values())
    refused = line(lambda: shardwise.prepare(models["one"], optimizers, Plan(strategy="ddp", engine="torch")))
    assert refused.startswith("engine = 'torch' takes one optimizer")


@pytest.mark.timeout(60)
def test_torchs_engines_take_one_optimizer() -> None:
    run_ranks(on_torch, num_ranks=1)
