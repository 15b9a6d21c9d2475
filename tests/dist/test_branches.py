"""Ranks that call different units: in two forwards before a backward, in forwards without one, and in evaluations."""

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Plan

WIDTH = 6
RANKS = 2


class Branching(nn.Module):
    """Calls one of two experts of equal size, another one on each rank, and every third time the last block.

    A gather of the wrong expert would give wrong values, and no error. `fails`: it raises after that.
    """

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, number: int) -> Tensor:
        x = torch.tanh(self.experts[number % 2](self.first(x)))
        if self.fails:
            raise ValueError("an error of the model")
        return self.last(x) if number % 3 == 0 else x


def loss_of(model: nn.Module, *, number: int, rank: int) -> Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
    return model(x, number + rank).square().mean()


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Branching()
    model.experts[0].weight.requires_grad_(False)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def trains(
    loss: Callable[[int], Tensor],
    *,
    backward: Callable[..., None],
    step: Callable[[], None],
    observe: Callable[[Tensor], None],
) -> None:
    """The loop that is compared. `backward(*numbers)` is of the sum of their losses; with `again`, twice in turn."""
    for first in range(0, 40, 10):
        backward(first, first + 1)
        step()
        observe(loss(first + 2))
        with torch.no_grad():
            observe(loss(first + 3))
        backward(first + 4, evaluated=first + 5)
        backward(first + 6)
        backward(first + 7, again=True)
        step()


def on_a_rank(rank: int, strategy: str, dynamic: bool) -> tuple[list[float], list[Tensor]]:
    model, optimizer = make_model()
    plan = Plan(strategy=strategy, units="leaf", dynamic=dynamic)
    shardwise.prepare(model, optimizer, plan, watch_seconds=0.0)
    seen: list[float] = []

    def loss(number: int) -> Tensor:
        return loss_of(model, number=number, rank=rank)

    def backward(*numbers: int, evaluated: int | None = None, again: bool = False) -> None:
        losses = [loss(number) for number in numbers]
        if evaluated is not None:
            with torch.no_grad():
                seen.append(loss(evaluated).item())
        total = sum(losses)
        if again:
            total.backward(retain_graph=True)
        total.backward()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    trains(loss, backward=backward, step=step, observe=lambda found: seen.append(found.item()))
    return seen, list(shardwise.full_state_dict(model)["model"].values())


def in_one_process(rank: int) -> tuple[list[float], list[Tensor]]:
    model, optimizer = make_model()
    seen: list[float] = []

    def backward(*numbers: int, evaluated: int | None = None, again: bool = False) -> None:
        for other in range(RANKS):
            for _ in range(1 + again):
                (sum(loss_of(model, number=number, rank=other) for number in numbers) / RANKS).backward()
        if evaluated is not None:
            seen.append(loss_of(model, number=evaluated, rank=rank).item())

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def loss(number: int) -> Tensor:
        return loss_of(model, number=number, rank=rank)

    trains(loss, backward=backward, step=step, observe=lambda found: seen.append(found.item()))
    return seen, list(model.state_dict().values())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("strategy", ["shard_grad_op", "fsdp"])
def test_ranks_take_different_branches_in_forwards_of_all_kinds_and_agree_with_one_process(
    strategy: str, dynamic: bool
) -> None:
    found = run_ranks(on_a_rank, num_ranks=RANKS, args=(strategy, dynamic), timeout_seconds=20)
    for rank, (seen, weights) in enumerate(found):
        expected, values = in_one_process(rank)
        assert seen == pytest.approx(expected, rel=1e-6)
        for ours, theirs in zip(weights, values, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def fails(rank: int, *, number: int) -> bool:
    """Whether a forward raises: in two of four on all ranks, in one on one of them."""
    return number % 4 in (0, 1) or (number % 4 == 2 and rank == number // 4 % 2)


def skips(rank: int, strategy: str, dynamic: bool) -> tuple[list[float], list[Tensor]]:
    """Train, and evaluate after each step; a batch is left out by all ranks if the forward of any of them raises."""
    model, optimizer = make_model()
    shardwise.prepare(model, optimizer, Plan(strategy=strategy, units="leaf", dynamic=dynamic), watch_seconds=0.0)
    seen: list[float] = []
    for number in range(12):
        model.fails = fails(rank, number=number)
        loss = None
        with suppress(ValueError):
            loss = loss_of(model, number=number, rank=rank)
        worked = torch.tensor(loss is not None)
        dist.all_reduce(worked, op=dist.ReduceOp.MIN)
        if worked and loss is not None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with suppress(ValueError), torch.no_grad():
            seen.append(loss_of(model, number=number, rank=rank).item())
    return seen, list(shardwise.full_state_dict(model)["model"].values())


def skips_in_one_process(rank: int) -> tuple[list[float], list[Tensor]]:
    model, optimizer = make_model()
    seen: list[float] = []
    for number in range(12):
        if not any(fails(other, number=number) for other in range(RANKS)):
            for other in range(RANKS):
                (loss_of(model, number=number, rank=other) / RANKS).backward()
            optimizer.step()
            optimizer.zero_grad()
        if not fails(rank, number=number):
            seen.append(loss_of(model, number=number, rank=rank).item())
    return seen, list(model.state_dict().values())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("strategy", ["shard_grad_op", "fsdp"])
def test_ranks_in_different_branches_catch_errors_of_the_model_and_train_on(strategy: str, dynamic: bool) -> None:
    found = run_ranks(skips, num_ranks=RANKS, args=(strategy, dynamic), timeout_seconds=20)
    for rank, (seen, weights) in enumerate(found):
        expected, values = skips_in_one_process(rank)
        assert seen == expected
        assert all(map(torch.equal, weights, values))


class Gated(nn.Module):
    """Writes into what its layer returns, so that backward comes to that last."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = torch.unsafe_chunk(self.up(x), 2, -1)
        return x + gate.sigmoid_() * value.tanh_()


class Checkpointing(nn.Module):
    """Has two parts in checkpoints of its own, of which ranks call the second by turns, and then one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gated = nn.ModuleList(Gated() for _ in range(2))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.experts[0].bias.requires_grad_(False)

    def forward(self, x: Tensor, number: int) -> Tensor:
        for gated in self.gated[: 1 + number % 2]:
            x = checkpoint(gated, x, use_reentrant=False)
        return torch.tanh(self.experts[number // 2 % 2](x))


def checkpoints(rank: int, prefetch: int | None, forwards: int) -> list[Tensor]:
    """Train on one rank; without `prefetch`, all ranks in one process."""
    torch.manual_seed(0)
    model = Checkpointing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ranks = range(RANKS) if prefetch is None else [rank]
    if prefetch is not None:
        plan = Plan(strategy="fsdp", units="leaf", prefetch=prefetch)
        shardwise.prepare(model, optimizer, plan, watch_seconds=0.0)
    for step in range(6):
        for one in ranks:
            numbers = range(step * forwards, (step + 1) * forwards)
            (sum(loss_of(model, number=number, rank=one) for number in numbers) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list((model.state_dict() if prefetch is None else shardwise.full_state_dict(model)["model"]).values())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_layers_of_a_checkpoint_are_computed_again_after_units_that_one_rank_has_called(
    prefetch: int, forwards: int
) -> None:
    expected = checkpoints(0, None, forwards)
    for weights in run_ranks(checkpoints, num_ranks=RANKS, args=(prefetch, forwards), timeout_seconds=20):
        assert all(map(torch.equal, weights, expected))
