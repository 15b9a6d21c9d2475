"""Ranks replay together or not at all, whatever each of them sees. Graphs are stood in for on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs_on_cpu import captured_on_cpu
from ranks import run_ranks
from torch import Tensor, nn
from whole import whole

import shardwise
from shardwise import Plan


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        return self.second(x) if mask.all() else self.second(x * mask[:, None])


class ReadsOnRankOne(nn.Linear):
    """A number is read on one rank alone."""

    rank = 0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if self.rank == 0 else float(mask.sum().item() > 0))


def batch(step: int, *, rank: int, padded: bool = False, size: int = 4) -> tuple[Tensor, Tensor]:
    mask = torch.ones(size, dtype=torch.bool)
    mask[-1] = not padded
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(100 * step + rank)), mask


def trained(
    model: nn.Module,
    *,
    strategy: str,
    batches: Callable[[int], tuple[Tensor, Tensor]],
    captured: bool,
    steps: int,
    after: Callable[[Any, int], None] = lambda taken, number: None,
    **settings: Any,
) -> tuple[list[float], dict[str, Tensor], list[bool], list[str]]:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    shardwise.prepare(model, optimizer, Plan(strategy=strategy, **settings))

    def step(*inputs: Tensor) -> Tensor:
        loss = model(*inputs).square().mean()
        loss.backward()
        shardwise.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    taken: Any = step
    lines: list[str] = []
    if captured:
        taken, lines, _ = captured_on_cpu(step, model, optimizer)
    losses, replayed = [], []
    for number in range(steps):
        losses.append(taken(*batches(number)).item())
        replayed.append(captured and taken.report.captured)
        after(taken, number)
    return losses, {name: value.clone() for name, value in model.state_dict().items()}, replayed, lines


def pads_and_sizes(rank: int, strategy: str) -> list[bool]:
    """Padded on the last rank in some steps, and in one step a smaller batch on the first."""

    def batches(step: int) -> tuple[Tensor, Tensor]:
        return batch(step, rank=rank, padded=rank == 1 and step in (7, 16), size=3 if rank == 0 and step == 10 else 4)

    found = [
        trained(Looking(), strategy=strategy, batches=batches, captured=captured, steps=20)
        for captured in (True, False)
    ]
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[1][1])
    return found[0][2]


@pytest.mark.parametrize("strategy", ["zero2", "fsdp", *whole("ddp")])
def test_a_guard_that_fails_on_one_rank_fails_on_all_and_sizes_that_differ_make_an_ordinary_step(strategy: str) -> None:
    one, other = run_ranks(pads_and_sizes, num_ranks=2, args=(strategy,))
    assert one == other
    # Steps 4 and 14 hold the replays that are compared.
    assert [step for step, replayed in enumerate(one) if not replayed] == [0, 1, 2, 3, 7, 10, 14, 16]


def reads_on_one(rank: int) -> tuple[bool, list[str]]:
    model = ReadsOnRankOne(8, 8)
    model.rank = rank
    _, _, replayed, lines = trained(
        model, strategy="ddp", batches=lambda step: batch(step, rank=rank), captured=True, steps=8
    )
    return any(replayed), lines


def test_what_one_rank_cannot_capture_none_does_and_the_line_names_it() -> None:
    found = run_ranks(reads_on_one, num_ranks=2)
    assert [replayed for replayed, _ in found] == [False, False]
    (line,) = found[0][1]
    assert line.startswith("capture: ordinary steps, not captured: rank 1: test_capture_agreement.py:")
    assert line.endswith("reads a number from the device")


def leaves_behind(rank: int) -> list[bool]:
    """A guard fails on both ranks; the ordinary step of one leaves something alive in the memory of the graphs."""

    def leave(taken: Any, number: int) -> None:
        if rank == 1 and number in (7, 14):
            taken._memory.pool.in_use = {(number, number + 1)}

    _, _, replayed, lines = trained(
        Looking(),
        strategy="fsdp",
        batches=lambda step: batch(step, rank=rank, padded=step in (7, 14)),
        captured=True,
        steps=20,
        after=leave,
    )
    assert len(lines) == (1 if rank == 0 else 2)
    return replayed


def test_what_one_rank_would_overwrite_costs_all_ranks_their_graphs_and_they_capture_again_together() -> None:
    one, other = run_ranks(leaves_behind, num_ranks=2)
    assert one == other
    # Steps 3 and 16 hold replays 1 and 10, which are compared.
    assert [step for step, replayed in enumerate(one) if not replayed] == [0, 1, 2, 3, 7, 8, 14, 15, 16]


HOST = {
    "states": {"offload_states": True},
    "states of a unit": {"offload_states": ["second"]},
    "states, replicated parameters": {"offload_states": True, "strategy": "zero2"},
    "activations": {"offload_activations": True},
}


def with_units_on_the_host(rank: int, settings: dict[str, Any]) -> list[bool]:
    """The same training, captured with units in host memory and ordinary without."""

    def batches(step: int) -> tuple[Tensor, Tensor]:
        return batch(step, rank=rank, padded=rank == 1 and step == 7)

    usual = {"strategy": "fsdp", "units": "class:Linear", "batches": batches, "steps": 12}
    captured = trained(Looking(), captured=True, **{**usual, **settings})
    ordinary = trained(Looking(), captured=False, **usual)
    assert captured[0] == ordinary[0]
    assert all(torch.equal(captured[1][name], ordinary[1][name]) for name in ordinary[1])
    return captured[2]


@pytest.mark.parametrize("name", HOST)
def test_steps_with_units_in_host_memory_are_replayed_to_the_same_bits(name: str) -> None:
    one, other = run_ranks(with_units_on_the_host, num_ranks=2, args=(HOST[name],))
    assert one == other
    assert [step for step, replayed in enumerate(one) if not replayed] == [0, 1, 2, 3, 7]


class Block(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(8, 8), Block(8, 8))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.blocks(x * mask[:, None])
        return found


def compiles_again(rank: int) -> list[bool]:
    """The second rank compiles its blocks a second time, in the last step before the one that would be captured."""

    def batches(step: int) -> tuple[Tensor, Tensor]:
        if rank == 1 and step == 3:
            torch._dynamo.reset()
        return batch(step, rank=rank)

    found = []
    for captured in (True, False):
        torch._dynamo.reset()
        plan = {"units": "class:Block", "compile": "aot_eager"}
        found.append(trained(Blocks(), strategy="fsdp", batches=batches, captured=captured, steps=10, **plan))
    torch._dynamo.reset()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[1][1])
    return found[0][2]


def test_ranks_wait_for_one_that_compiles_again_before_they_capture() -> None:
    one, other = run_ranks(compiles_again, num_ranks=2)
    assert one == other
    # Steps 0 and 3 compile on a rank; three more are warm there, and the first replay is compared.
    assert one == [False] * 6 + [True] * 4
