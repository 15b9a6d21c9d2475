"""Units that are recomputed train as units that are not, bit for bit, under every strategy."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from cases import GPT, LLAMA, RESNET, adamw, make_images, make_tokens, sgd
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop
from training import make_collectives
from whole import strategies

from shardwise.engines import prepare
from shardwise.models.tasks import cross_entropy
from shardwise.plan import Plan

MODES = ("none", "full", "selective")
# Selective learns in the first what it need not keep; the second runs by the program.
NUM_STEPS = 2


def trained(
    plan: Plan, *, rank: int, make: Callable[[], Any], early_stop: bool = True
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and state of a short training; random numbers differ between ranks, and are the same every time."""
    torch.manual_seed(1234)
    model, batch = make()
    optimizer = adamw(model.parameters())
    prepare(model, optimizer, plan, collectives=make_collectives(late=True, rank=rank))
    torch.manual_seed(rank)
    losses = []
    for step in range(NUM_STEPS):
        with nullcontext() if early_stop else set_checkpoint_early_stop(False):
            loss = cross_entropy(model, batch(step, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def assert_same(found: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), name


def with_dropout(rank: int, strategy: str) -> list[float]:
    make = partial(make_tokens, replace(GPT, dropout=0.2))
    plans = [Plan(strategy=strategy, recompute=mode, bucket_bytes=4000) for mode in MODES]
    expected = trained(plans[0], rank=rank, make=make)
    for plan in plans[1:]:
        assert_same(trained(plan, rank=rank, make=make), expected)
    assert_same(trained(plans[2], rank=rank, make=make, early_stop=False), expected)
    return expected[0]


@pytest.mark.parametrize("strategy", strategies("zero2", "fsdp"))
def test_dropout_is_the_same_in_a_recomputation_and_another_on_each_rank(strategy: str) -> None:
    first, second = run_ranks(with_dropout, num_ranks=2, args=(strategy,))
    assert first[0] != second[0]


def with_statistics(rank: int, strategy: str) -> None:
    make = partial(make_images, RESNET)
    expected = trained(Plan(strategy=strategy), rank=rank, make=make)
    for mode in MODES[1:]:
        found = trained(Plan(strategy=strategy, recompute=mode), rank=rank, make=make)
        assert_same(found, expected)
        assert all(count == NUM_STEPS for name, count in found[1].items() if "num_batches" in name)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_batch_norm_counts_a_batch_once(strategy: str) -> None:
    run_ranks(with_statistics, num_ranks=2, args=(strategy,))


def units_within_units(rank: int, strategy: str) -> None:
    make = partial(make_tokens, LLAMA)
    units = "auto + blocks.0.attention + blocks.2.feed_forward"
    expected = trained(Plan(strategy=strategy), rank=rank, make=make)
    for mode, overrides in (("full", {}), ("selective", {"blocks.0": "none"}), ("none", {"blocks.2": "selective"})):
        plan = Plan(strategy=strategy, units=units, recompute=mode, recompute_overrides=overrides)
        assert_same(trained(plan, rank=rank, make=make), expected)


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_a_unit_within_a_recomputed_unit_is_recomputed_with_it(strategy: str) -> None:
    run_ranks(units_within_units, num_ranks=2, args=(strategy,))


class Rich(nn.Module):
    """A unit with keywords, containers in and out, and two outputs of which the last call's second is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 11)
        self.second = nn.Linear(11, 7)

    def forward(self, state: dict[str, Tensor], *, scale: Tensor, log: list[int]) -> tuple[dict[str, Tensor], Tensor]:
        log.append(len(log))
        hidden = torch.tanh(self.first(state["x"]) * scale)
        return {"x": self.second(hidden) + state["x"]}, hidden.square().mean()


class Called(nn.Module):
    """Calls its first block twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Rich() for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        log: list[int] = []
        state = {"x": x}
        penalty = torch.zeros(())
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            state, extra = block(state, scale=self.scale, log=log)
            penalty = penalty + extra
        self.num_calls = len(log)
        return state["x"].square().mean() + penalty


def rich_units(rank: int, strategy: str) -> None:
    results = []
    for mode in MODES:
        torch.manual_seed(3)
        model = Called()
        optimizer = sgd(model.parameters())
        prepare(
            model,
            optimizer,
            Plan(strategy=strategy, units="class:Rich", recompute=mode),
            collectives=make_collectives(late=True, rank=rank),
        )
        torch.manual_seed(rank)
        losses = []
        for _ in range(3):
            loss = model(torch.randn(5, 7))
            # Twice through one graph.
            (0.25 * loss).backward(retain_graph=True)
            (0.75 * loss).backward()
            assert model.num_calls == 3
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append((losses, model.state_dict()))
    for result in results[1:]:
        assert_same(result, results[0])


@pytest.mark.parametrize("strategy", strategies("ddp", "fsdp"))
def test_a_unit_may_be_called_twice_with_keywords_and_containers_and_gone_back_through_twice(strategy: str) -> None:
    run_ranks(rich_units, num_ranks=2, args=(strategy,))
