"""Adapters that are added, and a head that is replaced, after `prepare`."""

import copy
import warnings

import pytest
import torch
from later import WIDTH, averaged_step, change, inputs, make_adam, make_late
from ranks import run_ranks
from torch import Tensor, nn
from training import line, make_collectives
from whole import whole

import shardwise
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh

STEPS = 2
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")


def alone(rank: int, changed: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = make_late()
    optimizer = make_adam(model.parameters())
    for step in range(2 * STEPS):
        if step == STEPS:
            optimizer.add_param_group({"params": change(changed, model, optimizer), "lr": 0.02})
        averaged_step(model, optimizer, lambda rank: model(inputs(step, rank)).square().mean())  # noqa: B023
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    moments = {names[id(p)]: state["exp_avg"] for p, state in optimizer.state.items() if id(p) in names}
    return dict(model.state_dict()), moments


def extended(rank: int, changed: str, plan: Plan) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = make_late()
    optimizer = make_adam(model.parameters())
    shardwise.prepare(model, optimizer, plan, collectives=make_collectives(late=True, rank=rank))
    for step in range(2 * STEPS):
        if step == STEPS:
            # A forward without a backward, which leaves units gathered.
            model(inputs(step, rank))
            new = change(changed, model, optimizer)
            if rank == 1:
                with torch.no_grad():
                    # Values come from rank 0.
                    new[0].add_(1)
            shardwise.extend(model)
            optimizer.add_param_group({"params": new, "lr": 0.02})
        model(inputs(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state = shardwise.full_state_dict(model, optimizer)
    assert state["model"].keys() == dict(shardwise.weight_stream(model)).keys()
    with torch.no_grad():
        # A copy is an ordinary model, which computes in fp32.
        assert plan.precision == "bf16" or torch.equal(copy.deepcopy(model)(inputs(9, 0)), model(inputs(9, 0)))
    return state["model"], {name: values["exp_avg"] for name, values in state["optimizer"]["state"].items()}


@pytest.mark.timeout(90)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("changed", ["both", *whole("head", "adapters")])
def test_what_is_added_after_prepare_trains_bit_equal_to_one_process(changed: str, strategy: str) -> None:
    ((weights, moments),) = run_ranks(alone, num_ranks=1, args=(changed,))
    for found, found_moments in run_ranks(extended, num_ranks=2, args=(changed, Plan(strategy=strategy))):
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], value) for name, value in weights.items())
        assert found_moments.keys() == moments.keys()
        assert all(torch.equal(found_moments[name], value) for name, value in moments.items())


PLANS = {
    "offloaded": Plan(strategy="fsdp", offload_states=True),
    "two groups": Plan(strategy="zero2", mesh=Mesh(replicate=2, shard=1)),
    "dynamic": Plan(strategy="fsdp", dynamic=True),
    "recomputed": Plan(strategy="fsdp", recompute="full"),
}


@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", whole(*PLANS))
def test_it_does_under_other_plans(name: str) -> None:
    ((weights, _),) = run_ranks(alone, num_ranks=1, args=("both",))
    for found, _ in run_ranks(extended, num_ranks=2, args=("both", PLANS[name])):
        assert all(torch.equal(found[key], value) for key, value in weights.items())


@pytest.mark.timeout(90)
def test_they_do_in_bf16_as_under_another_strategy() -> None:
    first, second = (
        run_ranks(extended, num_ranks=2, args=("both", Plan(strategy=strategy, precision="bf16")))[0][0]
        for strategy in ("ddp", "fsdp")
    )
    assert all(torch.equal(first[name], value) for name, value in second.items())


def refused(rank: int) -> None:
    model = make_late()
    optimizer = make_adam(model.parameters())
    shardwise.prepare(model, optimizer, Plan())
    model.head = nn.Linear(WIDTH, 2 + rank)
    assert "different models: head.weight [2, 6]" in line(lambda: shardwise.extend(model))
    model.head = nn.Linear(WIDTH, 2, device="meta")
    assert "head.weight is on the meta device" in line(lambda: shardwise.extend(model))
    model.head = nn.Linear(WIDTH, 2)
    block, model.blocks[0] = model.blocks[0], copy.deepcopy(make_late().blocks[0])
    assert "unit blocks.0 was added, taken away or replaced" in line(lambda: shardwise.extend(model))
    model.blocks[0] = block
    average = shardwise.EMA(model, decay=0.9)
    assert "shardwise.EMA" in line(lambda: shardwise.extend(model))
    del average
    with shardwise.accumulate(model):
        assert "in the middle of an accumulation" in line(lambda: shardwise.extend(model))
    # Nothing was touched.
    shardwise.extend(model)
    optimizer.add_param_group({"params": model.head.parameters()})
    model(inputs(0, rank)).square().mean().backward()
    optimizer.step()


@pytest.mark.timeout(60)
def test_what_cannot_be_taken_over_is_refused_before_anything_is_touched() -> None:
    run_ranks(refused, num_ranks=2)


def extends_owned(rank: int) -> str:
    model = make_late()
    optimizer = torch.optim.Adafactor(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shardwise.prepare(model, optimizer, Plan(strategy="fsdp"))
    change("head", model, optimizer)
    return line(lambda: shardwise.extend(model))


def test_a_model_whose_parameters_have_owners_is_refused() -> None:
    for refused in run_ranks(extends_owned, num_ranks=2):
        assert "with parameters that are OWNED" in refused
