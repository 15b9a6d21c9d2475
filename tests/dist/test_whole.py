"""`shardwise.whole`: parameters whole on every rank, to be read or written, under every strategy."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from adapted import make_adapted
from cases import GPT, adamw, make_tokens
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import line, make_collectives
from whole import strategies, whole

import shardwise
from shardwise.comm.groups.agreement import RanksDisagree
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES

PLANS = [Plan(strategy=strategy) for strategy in STRATEGIES]
IN_BF16 = {strategy: Plan(strategy=strategy, precision="bf16") for strategy in STRATEGIES}


def prepared(plan: Plan, *, rank: int) -> Any:
    torch.manual_seed(3)
    model, batch = make_tokens(GPT)
    optimizer = adamw(model.parameters())
    shardwise.prepare(model, optimizer, plan, collectives=make_collectives(late=True, rank=rank))
    return model, optimizer, batch


def train(model: nn.Module, optimizer: Any, batch: Any, *, rank: int, step: int) -> float:
    loss = cross_entropy(model, batch(step, rank))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def reads(rank: int, plans: list[Plan]) -> None:
    for plan in plans:
        model, optimizer, batch = prepared(plan, rank=rank)
        for step in range(2):
            train(model, optimizer, batch, rank=rank, step=step)
            expected = model.state_dict()
            with shardwise.whole(model):
                for name, parameter in model.named_parameters():
                    assert type(parameter) is nn.Parameter
                    assert parameter.dtype == torch.float32
                    assert torch.equal(parameter, expected[name]), (plan, name)
        train(model, optimizer, batch, rank=rank, step=2)


@pytest.mark.parametrize("plans", [[*PLANS, IN_BF16["zero1"], IN_BF16["fsdp"]], *whole([*IN_BF16.values()])])
def test_parameters_are_whole_with_all_digits_and_training_goes_on(plans: list[Plan]) -> None:
    run_ranks(reads, num_ranks=2, args=(plans,))


# Writes


def alone(num_steps: int) -> dict[str, Tensor]:
    """The same in one process: two ranks' batches, clamped weights after each step."""
    from adapted import one_step

    torch.manual_seed(3)
    model, batch = make_tokens(GPT)
    optimizer = adamw(model.parameters())
    for step in range(num_steps):
        one_step(model, [batch(step, 0), batch(step, 1)])
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.02, 0.02)
    return model.state_dict()


def clamps(rank: int, plan: Plan | None) -> dict[str, Tensor]:
    if plan is None:
        return alone(3)
    model, optimizer, batch = prepared(plan, rank=rank)
    for step in range(3):
        train(model, optimizer, batch, rank=rank, step=step)
        with shardwise.whole(model, write=True), torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                # In ways that torch counts, and in one that it does not.
                (parameter.data if number % 2 else parameter).clamp_(-0.02, 0.02)
    return model.state_dict()


@pytest.mark.parametrize("strategy", strategies("zero2", "fsdp"))
def test_weights_that_are_clamped_after_each_step_train_bit_equal_to_one_process(strategy: str) -> None:
    (expected,) = run_ranks(clamps, num_ranks=1, args=(None,))
    for weights in run_ranks(clamps, num_ranks=2, args=(Plan(strategy=strategy),)):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("strategy", ["fsdp", *whole("zero1", "zero2", "shard_grad_op")])
def test_in_bf16_what_is_written_reaches_the_masters_as_under_ddp(strategy: str) -> None:
    expected = run_ranks(clamps, num_ranks=2, args=(IN_BF16["ddp"],))[0]
    assert all(weight.abs().max() <= 0.02 for weight in expected.values())
    assert any((weight != weight.bfloat16().float()).any() for weight in expected.values())
    for weights in run_ranks(clamps, num_ranks=2, args=(IN_BF16[strategy],)):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def merges(rank: int, plans: list[Plan]) -> None:
    """Adapters are merged into their frozen base, and taken out again."""
    for plan in plans:
        torch.manual_seed(3)
        model, batch = make_adapted()
        shardwise.prepare(model, adamw(model.parameters()), plan)
        given = batch(0, rank)[0]
        with torch.no_grad():
            before = model(given)
        linears = [model.blocks[0].linear, model.blocks[2].linear]
        with shardwise.whole(model, write=True), torch.no_grad():
            ups = [linear.up.weight.clone() for linear in linears]
            for linear in linears:
                linear.base.weight += linear.up.weight @ linear.down.weight
                linear.up.weight.zero_()
        with torch.no_grad():
            assert torch.allclose(model(given), before, atol=1e-4), plan
            assert not torch.equal(model(given), before)
        with shardwise.whole(model, write=True), torch.no_grad():
            for linear, up in zip(linears, ups, strict=True):
                linear.base.weight -= up @ linear.down.weight
                linear.up.weight.copy_(up)
        with torch.no_grad():
            assert torch.allclose(model(given), before, atol=1e-4), plan


def test_adapters_are_merged_into_a_frozen_base_and_taken_out_again() -> None:
    run_ranks(merges, num_ranks=2, args=([Plan(strategy=name, units="class:AdaptedBlock") for name in STRATEGIES],))


# Libraries


def averages(rank: int, plans: list[Plan]) -> None:
    """torch's own AveragedModel, fed inside the block, copied back for an evaluation, and the weights restored."""
    for plan in plans:
        model, optimizer, batch = prepared(plan, rank=rank)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        for step in range(3):
            train(model, optimizer, batch, rank=rank, step=step)
            with shardwise.whole(model):
                averaged.update_parameters(model)
            for name, value in model.state_dict().items():
                expected[name] = value.clone() if step == 0 else torch.lerp(expected[name], value, 0.5)
        own = {name: value.clone() for name, value in model.state_dict().items()}
        values = dict(averaged.module.named_parameters())
        for source in (values, own):
            with shardwise.whole(model, write=True), torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(source[name])
            found = model.state_dict()
            assert all(torch.equal(found[name], source[name]) for name in source), plan
        assert all(torch.equal(values[name], expected[name]) for name in values), plan


def test_torchs_averaged_model_works_on_it() -> None:
    run_ranks(averages, num_ranks=2, args=([Plan(strategy="ddp"), Plan(strategy="zero2", precision="bf16"), Plan()],))


def asked_inside(rank: int, plans: list[Plan]) -> None:
    for plan in plans:
        model, optimizer, batch = prepared(plan, rank=rank)
        train(model, optimizer, batch, rank=rank, step=0)
        expected = model.state_dict()
        with shardwise.whole(model):
            state, copied = model.state_dict(), deepcopy(model).state_dict()
            assert all(torch.equal(state[name], expected[name]) for name in expected), plan
            assert all(torch.equal(copied[name], expected[name]) for name in expected), plan
        train(model, optimizer, batch, rank=rank, step=1)


def test_state_dicts_and_copies_are_made_inside_too() -> None:
    run_ranks(asked_inside, num_ranks=2, args=([Plan(strategy="ddp"), Plan(strategy="zero1"), Plan(precision="bf16")],))


# Mistakes


def refused(rank: int, plan: Plan) -> list[str]:
    model, optimizer, batch = prepared(plan, rank=rank)
    train(model, optimizer, batch, rank=rank, step=0)
    weight = model.blocks[0].norm1.weight
    said = []

    def write_unannounced() -> None:
        with shardwise.whole(model), torch.no_grad():
            weight.data.mul_(2)

    said.append(line(write_unannounced))
    with shardwise.whole(model):
        said.append(line(lambda: cross_entropy(model, batch(1, rank))))
        with torch.no_grad():
            said.append(line(lambda: model(batch(1, rank)[0])))
        said.append(line(optimizer.step))
        said.append(line(lambda: shardwise.clip_grad_norm_(model, 1.0)))
        said.append(line(lambda: shardwise.whole(model).__enter__()))

    def write_differently() -> None:
        with shardwise.whole(model, write=True), torch.no_grad():
            weight.mul_(1 + rank)

    before = None if plan.strategy == "ddp" else model.state_dict()
    with pytest.raises(RanksDisagree) as caught:
        write_differently()
    said.append(str(caught.value))
    if before is not None:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return said


@pytest.mark.parametrize("strategy", ["zero2", "fsdp", *whole("ddp")])
def test_unannounced_writes_steps_inside_and_ranks_that_write_differently_are_refused(strategy: str) -> None:
    plan = Plan(strategy=strategy, precision="fp32" if strategy == "ddp" else "bf16")
    for said in run_ranks(refused, num_ranks=2, args=(plan,)):
        assert said[0].startswith("blocks.0.norm1.weight was written inside `with shardwise.whole(model):`")
        assert "write=True" in said[0]
        for what, words in zip(
            said[1:6], ("a forward that trains", "a forward", "optimizer.step()", "clip_grad_norm_"), strict=False
        ):
            assert what == f"{words} inside `with shardwise.whole(model):`: do it after the block"
        assert said[5].startswith("shardwise.whole(model) inside")
        assert said[6].startswith("rank 0 and rank 1 have written different values into blocks.0.norm1.weight")
