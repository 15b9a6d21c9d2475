"""Several backwards in one step: reduced by the last of them, or each by itself."""

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from cases import MODELS, adamw
from ranks import run_ranks, shut_down
from torch import Tensor, nn
from training import Case, Result, assert_equal, line, make_collectives
from whole import in_turn, strategies, whole

import shardwise
from shardwise.engine.engine import engine_of, tape
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES
from shardwise.program import Kind, build

PASSES = 3
GPT = Case(make=MODELS["gpt"], optimizer=adamw, num_steps=3)
# Replicated and sharded, each way.
each_strategy_and_way = pytest.mark.parametrize(
    ("strategy", "reduced"),
    [
        *(("zero1", False), ("zero2", True), ("fsdp", False)),
        *whole(("ddp", False), ("ddp", True), ("zero1", True), ("zero2", False)),
        *whole(("shard_grad_op", False), ("shard_grad_op", True), ("fsdp", True)),
    ],
)


def micro_batches(batch: Callable[[int, int], Any], *, step: int, rank: int) -> list[Any]:
    return [batch(10 * step + number, rank) for number in range(PASSES)]


def accumulated(rank: int, plan: Plan) -> Result:
    torch.manual_seed(1234)
    model, batch = GPT.make()
    model, optimizer = shardwise.prepare(
        model,
        adamw(model.parameters()),
        plan,
        collectives=make_collectives(late=True, rank=rank) if plan.engine == "shardwise" else None,
    )
    losses = []
    for step in range(GPT.num_steps):
        total = 0.0
        for number, given in enumerate(micro_batches(batch, step=step, rank=rank)):
            with shardwise.accumulate(model, enabled=number + 1 < PASSES):
                loss = cross_entropy(model, given) / PASSES
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([total])
    return Result(losses=losses, weights=dict(shardwise.full_state_dict(model)["model"]))


def in_one_process(rank: int, num_ranks: int, reduced: bool) -> Result:
    """Each rank's passes summed and then the ranks, or each pass averaged and then summed."""
    torch.manual_seed(1234)
    model, batch = GPT.make()
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(GPT.num_steps):
        grads: dict[tuple[int, int], list[Tensor]] = {}
        step_losses = [0.0] * num_ranks
        for other, number in product(range(num_ranks), range(PASSES)):
            model.zero_grad()
            loss = cross_entropy(model, micro_batches(batch, step=step, rank=other)[number]) / PASSES
            loss.backward()
            step_losses[other] += loss.item()
            grads[other, number] = [p.grad.clone() for p in model.parameters()]
        for index, parameter in enumerate(model.parameters()):
            if reduced:
                averages = [
                    sum_of([grads[other, number][index] for other in range(num_ranks)]) * (1 / num_ranks)
                    for number in range(PASSES)
                ]
                parameter.grad = sum_of(averages)
            else:
                sums = [sum_of([grads[other, number][index] for number in range(PASSES)]) for other in range(num_ranks)]
                parameter.grad = sum_of(sums) * (1 / num_ranks)
        optimizer.step()
        losses.append(step_losses)
    return Result(losses=losses, weights={name: p.detach().clone() for name, p in model.named_parameters()})


def sum_of(tensors: list[Tensor]) -> Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


@each_strategy_and_way
def test_accumulated_gradients_are_bit_equal_to_one_process(strategy: str, reduced: bool) -> None:
    (expected,) = run_ranks(in_one_process, num_ranks=1, args=(2, reduced))
    plan = Plan(strategy=strategy, accumulate_reduced=reduced, bucket_bytes=4000)
    assert_equal(run_ranks(accumulated, num_ranks=2, args=(plan,)), expected)


@pytest.mark.parametrize(
    ("precision", "reduced"), [("bf16", True), *whole(("fp16", False), ("bf16", False), ("fp16", True))]
)
def test_strategies_accumulate_alike_in_half_precision(precision: str, reduced: bool) -> None:
    """Gradients of 16 bits add up in the reduce dtype, so it does not matter where."""
    expected = None
    for strategy in STRATEGIES:
        plan = Plan(strategy=strategy, precision=precision, accumulate_reduced=reduced)
        for result in run_ranks(accumulated, num_ranks=2, args=(plan,)):
            expected = expected or result.weights
            assert all(torch.equal(result.weights[name], weight) for name, weight in expected.items()), strategy


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_torchs_engine_accumulates_under_the_same_name(strategy: str) -> None:
    shut_down()
    ours = run_ranks(accumulated, num_ranks=2, args=(Plan(strategy=strategy),))
    torchs = run_ranks(accumulated, num_ranks=2, args=(Plan(strategy=strategy, engine="torch"),))
    for one, other in zip(ours, torchs, strict=True):
        for name, weight in other.weights.items():
            torch.testing.assert_close(one.weights[name], weight, atol=1e-6, rtol=1e-5)
    shut_down()


def issued(rank: int, strategy: str, reduced: bool) -> None:
    model, batch = GPT.make()
    plan = Plan(strategy=strategy, accumulate_reduced=reduced)
    _, optimizer = shardwise.prepare(model, adamw(model.parameters()), plan)
    cross_entropy(model, batch(0, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    spec = engine_of(model).core.followed.spec
    with tape(model) as recorded:
        with shardwise.accumulate(model):
            cross_entropy(model, batch(1, rank)).backward()
        kept = [str(entry) for entry in recorded.take()]
        cross_entropy(model, batch(2, rank)).backward()
        optimizer.step()
        last = [str(entry) for entry in recorded.take()]
    expected = [op for op in build(spec, plan=plan, reduces=reduced).operations() if op.kind is not Kind.UPDATE]
    gathered_after_update = strategy in ("zero1", "zero2")
    assert kept == [str(op) for op in expected[: len(kept)]]
    assert all(op.kind is Kind.GATHER for op in expected[len(kept) :])
    if not gathered_after_update:
        assert last == list(map(str, build(spec, plan=plan).operations()))


@each_strategy_and_way
def test_a_pass_issues_what_its_program_says(strategy: str, reduced: bool) -> None:
    run_ranks(issued, num_ranks=2, args=(strategy, reduced))


def half_way(rank: int, strategy: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model, batch = GPT.make()
    _, optimizer = shardwise.prepare(model, adamw(model.parameters()), Plan(strategy=strategy))
    with shardwise.accumulate(model):
        cross_entropy(model, batch(0, rank)).backward()
    return model, optimizer, batch


def refused(rank: int, strategy: str) -> None:
    model, optimizer, batch = half_way(rank, strategy)
    assert "outside shardwise.accumulate" in line(optimizer.step)
    state = {name: value.clone() for name, value in GPT.make()[0].state_dict().items()}
    for action in (
        lambda: model.load_state_dict(state),
        lambda: shardwise.whole(model, write=True).__enter__(),
        lambda: copy.deepcopy(model),
        lambda: shardwise.clip_grad_norm_(model, 1.0),
    ):
        assert "in the middle of an accumulation" in line(action)
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    assert "frozen or thawed in the middle" in line(lambda: cross_entropy(model, batch(1, rank)))
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(True)
    # And then it goes on.
    cross_entropy(model, batch(1, rank)).backward()
    optimizer.step()
    model.state_dict()


@pytest.mark.parametrize("strategy", strategies("zero1", "fsdp"))
def test_what_would_lose_accumulated_gradients_is_refused(strategy: str) -> None:
    run_ranks(refused, num_ranks=2, args=(strategy,))


def read_half_way(rank: int, plan: Plan) -> None:
    """Train with and without reads of the state between passes: they show the last update, and change nothing."""
    trained = []
    for reads in (False, True):
        torch.manual_seed(1234)
        model, batch = GPT.make()
        _, optimizer = shardwise.prepare(
            model, adamw(model.parameters()), plan, collectives=make_collectives(late=True, rank=rank)
        )
        seen = [model.state_dict()]
        for step in range(GPT.num_steps):
            for number, given in enumerate(micro_batches(batch, step=step, rank=rank)):
                with shardwise.accumulate(model, enabled=number + 1 < PASSES):
                    cross_entropy(model, given).backward()
                    if reads and number == 0:
                        seen.append(shardwise.full_state_dict(model, optimizer)["model"])
                if reads and number == 1:
                    seen.append(model.state_dict())
                    with shardwise.whole(model):
                        shown = model.state_dict()
                        assert all(torch.equal(shown[name], value) for name, value in seen[-1].items())
            if reads:
                for found, last in pairwise(seen):
                    assert all(torch.equal(value, last[name]) for name, value in found.items())
            optimizer.step()
            optimizer.zero_grad()
            seen = [model.state_dict()]
        trained.append(shardwise.full_state_dict(model, optimizer))
    for first, second in zip(*map(values_of, trained), strict=True):
        assert torch.equal(first, second)


def values_of(state: dict[str, Any]) -> Iterator[Tensor]:
    yield from state["model"].values()
    for one in state["optimizer"]["state"].values():
        yield from (value for value in one.values() if isinstance(value, Tensor))


@each_strategy_and_way
def test_a_state_that_is_read_between_two_passes_is_the_last_updates_and_changes_nothing(
    strategy: str, reduced: bool
) -> None:
    plan = Plan(strategy=strategy, accumulate_reduced=reduced, precision="bf16" if reduced else "fp32")
    run_ranks(read_half_way, num_ranks=2, args=(plan,))


def cleared(rank: int, strategy: str, how: str) -> None:
    """Gradients that are cleared half-way are gone: the step is that of the last pass alone."""
    results = []
    for interrupted in (False, True):
        torch.manual_seed(3)
        model, batch = GPT.make()
        _, optimizer = shardwise.prepare(model, adamw(model.parameters()), Plan(strategy=strategy))
        if interrupted:
            with shardwise.accumulate(model):
                cross_entropy(model, batch(0, rank)).backward()
            if how == "model":
                model.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=how == "optimizer")
        cross_entropy(model, batch(1, rank)).backward()
        optimizer.step()
        results.append(model.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize(("how", "strategy"), in_turn(["model", "optimizer", "zeros"], "zero2", "fsdp"))
def test_zero_grad_clears_what_is_accumulated(strategy: str, how: str) -> None:
    run_ranks(cleared, num_ranks=2, args=(strategy, how))


def fails_half_way(rank: int, strategy: str) -> None:
    model, optimizer, batch = half_way(rank, strategy)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = model.blocks[1].register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
    with shardwise.accumulate(model), pytest.raises(ZeroDivisionError):
        cross_entropy(model, batch(1, rank)).backward()
    handle.remove()
    assert "begin the step again" in line(lambda: cross_entropy(model, batch(1, rank)))
    optimizer.zero_grad()
    cross_entropy(model, batch(1, rank)).backward()
    optimizer.step()

    torch.manual_seed(1234)
    again, _ = GPT.make()
    assert again.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("strategy", strategies("ddp", "fsdp"))
def test_a_backward_that_fails_half_way_asks_for_the_step_to_begin_again(strategy: str) -> None:
    run_ranks(fails_half_way, num_ranks=2, args=(strategy,))


def unused_in_one_pass(rank: int, strategy: str) -> None:
    """A parameter that any pass of any rank used has a gradient; one that none used has not."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.Linear(3, 3)})
    model.forward = lambda x, names: sum(model[name](x) for name in names)
    _, optimizer = shardwise.prepare(model, adamw(model.parameters()), Plan(strategy=strategy, units="leaf"))
    x = torch.ones(2, 3)
    with shardwise.accumulate(model):
        model(x, ["a", "b"] if rank == 0 else ["a"]).sum().backward()
    model(x, ["a"]).sum().backward()
    names = {}
    for flat in engine_of(model).core.flats:
        for part in flat.master.owned:
            names[flat.names[part.index][0]] = part.parameter.grad is not None
    assert names == {"a": True, "b": True, "c": False}
    before = optimizer.param_groups[0]["params"][-1].clone()
    optimizer.step()
    assert torch.equal(optimizer.param_groups[0]["params"][-1], before)


@pytest.mark.parametrize("strategy", strategies("zero2", "fsdp"))
def test_what_an_earlier_pass_used_counts_as_used(strategy: str) -> None:
    run_ranks(unused_in_one_pass, num_ranks=2, args=(strategy,))
