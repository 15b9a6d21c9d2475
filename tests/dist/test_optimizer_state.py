"""The state dict of a prepared optimizer is torch's, whole, under every strategy and number of ranks."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from cases import MODELS, OPTIMIZERS, adamw, make_awkward, squares
from ranks import run_ranks
from torch import Tensor, nn
from training import line
from whole import whole

import shardwise
from shardwise.base.errors import InvalidData
from shardwise.engine.engine import engine_of
from shardwise.engine.prepared.full_state import check_order
from shardwise.engines import require_engine
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan

STRATEGIES = ["ddp", "zero1", "zero2", "shard_grad_op", "fsdp"]
State = dict[str, Any]


def make(name: str) -> Any:
    torch.manual_seed(3)
    return (*make_awkward(), squares) if name == "awkward" else (*MODELS[name](), cross_entropy)


def train(model: nn.Module, optimizer: Any, batch: Any, loss: Any, *, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        value = loss(model, batch(step, rank))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def saved_and_resumed(rank: int, name: str, optimizer_name: str, plan: Plan) -> tuple[State, State, list[float]]:
    """The states after two steps, what rank 0 would save; losses of two more, which a resumed model repeats."""
    model, batch, loss = make(name)
    model, optimizer = shardwise.prepare(model, OPTIMIZERS[optimizer_name](model.parameters()), plan)
    train(model, optimizer, batch, loss, rank=rank, steps=range(2))
    saved = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    expected = train(model, optimizer, batch, loss, rank=rank, steps=range(2, 4))
    assert resumed(rank, name, optimizer_name, plan, *saved) == expected
    return *saved, expected


def loaded_and_saved(rank: int, name: str, optimizer_name: str, plan: Plan, state: State) -> State:
    model, _, _ = make(name)
    model, optimizer = shardwise.prepare(model, OPTIMIZERS[optimizer_name](model.parameters()), plan)
    optimizer.load_state_dict(state)
    return optimizer.state_dict()


def without_empty(state: State) -> State:
    """No rank owns a slice of a parameter without elements, so there is no state of it."""
    kept = {
        number: values
        for number, values in state["state"].items()
        if all(value.numel() for value in values.values() if isinstance(value, Tensor))
    }
    return {**state, "state": kept}


def resumed(rank: int, name: str, optimizer_name: str, plan: Plan, weights: State, state: State) -> list[float]:
    model, batch, loss = make(name)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    model, optimizer = shardwise.prepare(model, optimizer, plan)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    schedule.step()
    return train(model, optimizer, batch, loss, rank=rank, steps=range(2, 4))


def plain(name: str, optimizer_name: str, weights: State, state: State) -> State:
    """The same state once more, through an optimizer that nobody prepared."""
    model, _, _ = make(name)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    for (_, parameter), values in zip(model.named_parameters(), state["state"].values(), strict=False):
        for key, value in values.items():
            if isinstance(value, Tensor) and key != "step":
                assert value.shape == parameter.shape
    return optimizer.state_dict()


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        for ours, theirs in zip(one, other, strict=True):
            assert_same(ours, theirs)
    else:
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.ledger("optimizer-state-saved", outcome="right", under=tuple(STRATEGIES))
@pytest.mark.parametrize(("name", "optimizer"), [("awkward", "groups"), ("gpt", "adamw fused"), *whole(("gpt", "sgd"))])
def test_a_saved_optimizer_resumes_bit_for_bit_under_every_strategy_and_in_plain_torch(
    name: str, optimizer: str
) -> None:
    saved = {}
    for strategy in STRATEGIES:
        reports = run_ranks(saved_and_resumed, num_ranks=2, args=(name, optimizer, Plan(strategy=strategy)))
        assert_same(reports[0][:2], reports[1][:2])
        saved[strategy] = reports
        weights, state, _ = reports[0]
        assert_same(without_empty(state), without_empty(saved["ddp"][0][1]))
        if name == "gpt":
            assert_same(plain(name, optimizer, weights, state), state)
    weights, state, _ = saved["ddp"][0]
    # What plain torch saved is the same; each strategy takes it, whoever saved it.
    for strategy in STRATEGIES:
        found = run_ranks(resumed, num_ranks=2, args=(name, optimizer, Plan(strategy=strategy), weights, state))
        assert found == [report[2] for report in saved[strategy]]
    for again in run_ranks(loaded_and_saved, num_ranks=3, args=(name, optimizer, Plan(strategy="fsdp"), state)):
        assert_same(without_empty(again), without_empty(state))


def not_its_own(rank: int, strategy: str) -> None:
    model, batch, loss = make("gpt")
    model, optimizer = shardwise.prepare(model, adamw(model.parameters()), Plan(strategy=strategy))
    train(model, optimizer, batch, loss, rank=rank, steps=range(1))
    state = shardwise.full_state_dict(model, optimizer)
    weights, by_name, by_number = state["model"], state["optimizer"], optimizer.state_dict()
    assert list(by_number["state"]) == by_number["param_groups"][0]["params"]

    def load(optimizer_state: Any) -> None:
        shardwise.load_full_state_dict(model, optimizer, {"model": weights, "optimizer": optimizer_state})

    # Both formats are taken both ways.
    for loaded in (by_name, by_number):
        for way in (load, optimizer.load_state_dict):
            optimizer.state.clear()
            way(loaded)
            assert_same(optimizer.state_dict(), by_number)
    first = next(iter(by_name["state"]))
    renamed = {"module." + name: value for name, value in by_name["state"].items()}
    other_names = [{**by_name["param_groups"][0], "params": list(renamed)}]
    short = [{**by_number["param_groups"][0], "params": by_number["param_groups"][0]["params"][:-1]}]
    cut = {0: {"exp_avg": torch.zeros(5), "step": torch.ones(())}}
    wrong: list[tuple[Any, str]] = [
        ({**by_name, "state": renamed}, "'module."),
        ({"state": renamed, "param_groups": other_names}, "only in the"),
        ({**by_number, "state": {999: by_name["state"][first]}}, "999"),
        ({**by_number, "param_groups": short}, "parameters, the optimizer's"),
        ({**by_number, "param_groups": []}, "has 0 param groups, the optimizer 1"),
        (by_name["state"], "must have"),
    ]
    if strategy == "fsdp":
        wrong.append(({**by_number, "state": cut}, "exp_avg of"))
    for way in (load, optimizer.load_state_dict):
        for loaded, message in wrong:
            assert message in line(partial(way, loaded))
    assert_same(optimizer.state_dict(), by_number)


@pytest.mark.ledger("optimizer-state-by-number", outcome="right")
@pytest.mark.ledger("optimizer-state-of-others", outcome="refused")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_state_that_is_not_the_optimizers_is_refused_and_loads_nothing(strategy: str) -> None:
    run_ranks(not_its_own, num_ranks=2, args=(strategy,))


def loaded_too_early(rank: int, strategy: str) -> None:
    """An optimizer that is made after `prepare` is not known before its first step, and has full states by then."""
    model, batch, loss = make("gpt")
    model, optimizer = shardwise.prepare(model, adamw(model.parameters()), Plan(strategy=strategy))
    train(model, optimizer, batch, loss, rank=rank, steps=range(1))
    late = adamw(model.parameters())
    late.load_state_dict(optimizer.state_dict())
    loss(model, batch(1, rank)).backward()
    assert "hand a fresh one to shardwise.prepare, then load the old state" in line(late.step)
    # Handed over, or known by a call of ours, it takes the state.
    another = adamw(model.parameters())
    shardwise.load_full_state_dict(model, another, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert_same(another.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", *whole("ddp")])
def test_a_state_that_is_loaded_before_the_optimizer_is_known_is_refused(strategy: str) -> None:
    run_ranks(loaded_too_early, num_ranks=2, args=(strategy,))


def alone(rank: int) -> None:
    model, batch, loss = make("gpt")
    model, optimizer = shardwise.prepare(model, adamw(model.parameters()), Plan(strategy="zero1"))
    train(model, optimizer, batch, loss, rank=rank, steps=range(1))
    engine_of(model).core.followed.limit_seconds = 0.3
    if rank == 0:
        message = line(optimizer.state_dict)
        assert message == "rank 1 did not come to optimizer.state_dict within 0 s: call it on every rank"
    torch.distributed.barrier()
    engine_of(model).core.followed.limit_seconds = 60.0
    optimizer.state_dict()


def test_an_optimizers_state_dict_on_one_rank_alone_names_the_other() -> None:
    run_ranks(alone, num_ranks=2)


def test_a_state_in_the_optimizers_place_is_refused_with_the_right_order() -> None:
    with pytest.raises(InvalidData, match=r"is a dict: call load_full_state_dict\(model, optimizer, state\)"):
        check_order({"model": {}})


def allocated(rank: int) -> None:
    # Under bf16 the statistics' scales stay in fp32, where the optimizer steps the module's own parameters.
    kept_fp32 = ("resnet", "groups", Plan(strategy="ddp", precision="bf16"))
    owned = ("gpt", "groups", Plan(owned=("blocks.*.weight",)))
    fsdp = [("gpt", name, Plan()) for name in ("groups", "adamw fused", "adam foreach", "rmsprop")]
    for name, given, plan in (*fsdp, kept_fp32, owned):
        model, batch, loss = make(name)
        optimizer = OPTIMIZERS[given](model.parameters())
        shardwise.prepare(model, optimizer, plan)
        require_engine(model).allocate_states(optimizer)
        for group in optimizer.param_groups:
            assert all(optimizer.state[parameter] for parameter in group["params"])
        assert train(model, optimizer, batch, loss, rank=rank, steps=range(1))[0] > 0


def test_optimizer_state_can_be_allocated_before_the_first_step() -> None:
    run_ranks(allocated, num_ranks=2)
