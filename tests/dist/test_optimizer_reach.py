"""Optimizers that nobody knows by name train as one process does, or are refused; never anything else."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import given_optimizers as own
import pytest
import torch
from cases import MODELS
from ranks import run_ranks
from torch.optim import Optimizer
from training import Case, assert_equal, line, on_ranks, one_process
from whole import in_turn, whole

import shardwise
from shardwise.engines import prepare
from shardwise.plan import Plan

STRATEGIES = ["ddp", "zero1", "zero2", "fsdp"]
# Elementwise, or by blocks between which slices can be cut.
IN_SLICES: dict[str, Callable[[Any], Optimizer]] = {
    "lion": own.Lion,
    "subclass": partial(own.Plain, lr=1e-2),
    "blocks of 64": partial(own.BlockAdam, block=64),
    # Makes its state before the first step.
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "blocks of 256": partial(own.BlockAdam, block=256),
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *in_turn(["adagrad", "lion", "blocks of 64"], "zero2", "zero1", "fsdp", every=STRATEGIES),
        *whole(*product(("subclass", "blocks of 256"), STRATEGIES)),
    ],
)
def test_what_may_be_cut_is_bit_equal_to_one_process(name: str, strategy: str) -> None:
    case = Case(make=MODELS["gpt"], optimizer=IN_SLICES[name], num_steps=4)
    results = run_ranks(on_ranks, num_ranks=2, args=(case, Plan(strategy=strategy), True))
    assert_equal(results, one_process(case, num_ranks=2))


def blocks_state(rank: int, strategy: str, state: Any = None) -> Any:
    torch.manual_seed(3)
    model, batch = MODELS["gpt"]()
    optimizer = own.BlockAdam(model.parameters(), block=64)
    model, optimizer = shardwise.prepare(model, optimizer, Plan(strategy=strategy))
    if state is not None:
        shardwise.load_full_state_dict(model, optimizer, state)
        assert_same(shardwise.full_state_dict(model, optimizer), state)
    for step in range(2):
        shardwise.models.tasks.cross_entropy(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return shardwise.full_state_dict(model, optimizer)


def assert_same(one: Any, other: Any) -> None:
    """The optimizers' states in two full states."""
    ours, theirs = one["optimizer"]["state"], other["optimizer"]["state"]
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].keys() == theirs[name].keys()
        assert all(torch.equal(ours[name][key], theirs[name][key]) for key in ours[name]), name


def test_states_by_blocks_go_from_slices_to_whole_and_back() -> None:
    expected = run_ranks(blocks_state, num_ranks=2, args=("ddp",))[0]
    for strategy in ("zero2", "fsdp"):
        saved = run_ranks(blocks_state, num_ranks=2, args=(strategy,))[0]
        assert_same(saved, expected)
    again = run_ranks(blocks_state, num_ranks=2, args=("ddp", expected))[0]
    resumed = run_ranks(blocks_state, num_ranks=2, args=("fsdp", expected))[0]
    assert_same(resumed, again)


def refused(rank: int, strategy: str) -> None:
    for kind, expected in (
        (own.Prodigy, "optimizers.Prodigy looks at all parameters together in its update"),
        (own.LayerDecay, "optimizers.LayerDecay looks at all parameters together in its update"),
        (own.Elsewhere, "could not be tried on a small tensor (it does not step the parameters in its param_groups)"),
    ):
        model = MODELS["gpt"]()[0]
        message = line(lambda model=model, kind=kind: prepare(model, kind(model.parameters()), Plan(strategy=strategy)))
        assert expected in message
        assert "strategy = 'ddp'" in message
        # Nothing was touched.
        prepare(model, kind(model.parameters()), Plan(strategy="ddp"))


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", *whole("zero2")])
def test_what_looks_beyond_its_tensor_is_refused_slices(strategy: str) -> None:
    run_ranks(refused, num_ranks=2, args=(strategy,))


def sparse_adam(rank: int, strategy: str) -> str:
    model = torch.nn.Embedding(4, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    return line(lambda: shardwise.prepare(model, optimizer, Plan(strategy=strategy)))


def test_sparse_adam_is_refused_before_its_first_step() -> None:
    for strategy in ("ddp", "fsdp"):
        (refused,) = run_ranks(sparse_adam, num_ranks=1, args=(strategy,))
        assert refused.startswith("SparseAdam steps sparse gradients, and ranks add up dense ones: use Adam")


def adagrad_on_meta(rank: int) -> str:
    with torch.device("meta"):
        model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adagrad(model.parameters())
    return line(lambda: shardwise.prepare(model, optimizer, Plan(strategy="fsdp")))


def test_a_state_that_was_made_on_the_meta_device_is_one_line() -> None:
    (refused,) = run_ranks(adagrad_on_meta, num_ranks=1)
    assert "made its state when it was made, on the meta device" in refused
    assert "make it after shardwise.prepare" in refused


class Around(torch.optim.Optimizer):
    """As many a Lookahead: it shares the groups of the optimizer inside, and torch's __init__ is not called."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def around(rank: int, strategy: str) -> str:
    model = torch.nn.Linear(4, 4)
    optimizer = Around(torch.optim.SGD(model.parameters(), lr=0.1))
    return line(lambda: shardwise.prepare(model, optimizer, Plan(strategy=strategy)))


def test_an_optimizer_around_another_one_is_refused_and_names_the_way() -> None:
    for strategy in ("ddp", "fsdp"):
        (refused,) = run_ranks(around, num_ranks=1, args=(strategy,))
        assert refused.endswith("give the inner one to shardwise.prepare; docs/engine.md shows how")
