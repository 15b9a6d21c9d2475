"""Evaluations under torch.inference_mode: torch counts no writes to the tensors that are made there."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from loops import Model, batch, loss_of
from ranks import run_ranks
from simulated_graphs import simulated
from torch import Tensor, nn
from whole import strategies

import shardwise
from shardwise.engine.engine import engine_of
from shardwise.plan import Plan

Found = tuple[list[Tensor], dict[str, Tensor]]


def evaluated(model: Model, *, rank: int, mode: Callable[[], Any]) -> list[Tensor]:
    model.eval()
    with mode():
        losses = [loss_of(model, batch(100 + number, rank=rank), masked=number % 2 == 1) for number in range(8)]
    model.train()
    return [loss.clone() for loss in losses]


def trained(rank: int, strategy: str, mode: Callable[[], Any], evaluates_first: bool) -> tuple[Found, list[int]]:
    """Return the losses of evaluations and the weights; and how many calls were replayed, by part of the training."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shardwise.prepare(model, optimizer, Plan(strategy=strategy))
    graphs = engine_of(model).graphs
    torch.manual_seed(rank)
    losses = evaluated(model, rank=rank, mode=mode) if evaluates_first else []
    replayed = [0]
    for step in range(12):
        loss_of(model, batch(step, rank=rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            replayed.append(graphs.num_replayed if graphs else 0)
            losses += evaluated(model, rank=rank, mode=mode)
            replayed.append(graphs.num_replayed if graphs else 0)
    return (losses, shardwise.full_state_dict(model)["model"]), replayed


def assert_same(one: Found, other: Found) -> None:
    assert all(map(torch.equal, one[0], other[0]))
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())


def with_graphs_and_without(rank: int, strategy: str, evaluates_first: bool) -> list[int]:
    expected, _ = trained(rank, strategy, torch.no_grad, evaluates_first)
    eager, _ = trained(rank, strategy, torch.inference_mode, evaluates_first)
    with simulated(at_once=True):
        graphed, replayed = trained(rank, strategy, torch.inference_mode, evaluates_first)
    assert_same(eager, expected)
    assert_same(graphed, expected)
    return [after - before for before, after in pairwise(replayed)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("evaluates_first", [False, True])
@pytest.mark.parametrize("strategy", strategies("ddp", "fsdp"))
def test_an_evaluation_in_inference_mode_has_the_values_of_one_without_graphs_and_training_continues(
    strategy: str, evaluates_first: bool
) -> None:
    for replayed in run_ranks(with_graphs_and_without, num_ranks=2, args=(strategy, evaluates_first)):
        # Parts of training and evaluations in turn.
        assert min(replayed[2:]) > 0, replayed


def both_modes_in_turn(rank: int) -> int:
    def alternated(model: nn.Module) -> list[Tensor]:
        shardwise.prepare(model, None, Plan())
        found = []
        for number in range(16):
            with (torch.no_grad, torch.inference_mode)[number % 2]():
                found.append(loss_of(model, batch(number, rank=rank), masked=True).clone())
        return found

    torch.manual_seed(0)
    expected = alternated(Model(dropout=0.0))
    with simulated(at_once=True, moved=0.0):
        model = Model(dropout=0.0)
        assert all(map(torch.equal, alternated(model), expected))
    return engine_of(model).graphs.num_replayed


def test_each_way_of_evaluating_has_graphs_of_its_own() -> None:
    # The program is learned by a training; four blocks, all but two passes of each form.
    assert run_ranks(both_modes_in_turn, num_ranks=1) == [4 * (16 - 2 * 2)]


class Writing(nn.Linear):
    """Writes into its input, which its caller goes on to use."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.add_(1) if not torch.is_grad_enabled() else x)


class Caching(nn.Linear):
    """Holds what was made in inference mode, and writes into it there."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs)
        with torch.inference_mode():
            self.cache = torch.zeros(num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_inference_mode_enabled():
            self.cache += 1
        return super().forward(x) + self.cache


class Passing(nn.Linear):
    """Returns its input too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


class Mixed(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(4, 4), kind(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * 2
        y = self.second(x)
        y, x = y if isinstance(y, tuple) else (y, x)
        return self.third(y) + x


def mixed(kind: type[nn.Module]) -> tuple[Mixed, list[Tensor]]:
    model = Mixed(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    shardwise.prepare(model, optimizer, Plan(units="leaf"))
    found = []
    for step in range(8):
        with torch.inference_mode():
            inputs = [torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + i)) for i in range(3)]
            found += [model(x).clone() for x in inputs[:2]]
        # An inference tensor, as torch allows it where nothing is saved for backward.
        with torch.no_grad():
            found.append(model(inputs[2]).clone())
        loss = model(inputs[0].clone()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return model, [*found, *model.state_dict().values()]


def mixed_on_a_rank(rank: int, kind: type[nn.Module]) -> tuple[dict[str, str], int]:
    _, expected = mixed(kind)
    with simulated(at_once=True, moved=0.0):
        model, found = mixed(kind)
    assert all(map(torch.equal, found, expected))
    graphs = engine_of(model).graphs
    return {unit.name: unit.reason() for unit in graphs.units}, graphs.num_replayed


@pytest.mark.parametrize("kind", [Writing, Caching, Passing])
def test_a_unit_whose_writes_are_not_counted_has_the_bits_of_an_ordinary_one(kind: type[nn.Module]) -> None:
    ((reasons, num_replayed),) = run_ranks(mixed_on_a_rank, num_ranks=1, args=(kind,))
    assert reasons == {"first": "", "second": "", "third": ""}
    assert num_replayed >= 2 * 4 * 4


class Replacing(nn.Module):
    """Replaces a buffer in evaluations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            self.count = self.count + 1
        return self.inner(x) + self.count


def replacing(rank: int, mode: Callable[[], Any]) -> list[Tensor]:
    model = Replacing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    shardwise.prepare(model, optimizer, Plan())
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    for _ in range(3):
        with mode():
            model(x)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.clone() for value in model.state_dict().values()]


def test_a_buffer_that_an_evaluation_has_replaced_is_broadcast() -> None:
    expected, found = (
        run_ranks(replacing, num_ranks=2, args=(mode,)) for mode in (torch.no_grad, torch.inference_mode)
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))
