"""Units as graphs where a trace or a recording is interrupted: the step ends, or is an ordinary one; later ones are right."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ranks import run_ranks
from simulated_graphs import SimulatedGraphs, simulated
from torch import Tensor, nn

import shardwise
from shardwise.engine.engine import engine_of
from shardwise.engine.graphs.tracer import Tracer
from shardwise.plan import Plan

NUM_STEPS = 20


class Block(nn.Module):
    """`factor`: a flag that a user may change."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.factor * torch.tanh(self.inner(x))


class Disabled(Block):
    """torch does not trace it."""

    forward = torch.compiler.disable(Block.forward)  # type: ignore[assignment]


class Stack(nn.Module):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), kind(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def trained(
    rank: int,
    *,
    kind: type[Block] = Block,
    change: Callable[[nn.Module, int], None] = lambda model, step: None,
    left_out: tuple[int, ...] = (),
) -> tuple[list[int], list[Tensor], int]:
    """Train; return the steps that were interrupted, losses and weights, and how many calls were replays.

    change     is called with the model before each step
    left_out   the steps that are not taken
    """
    model = Stack(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    shardwise.prepare(model, optimizer, Plan(strategy="fsdp", units="auto + blocks.1"))
    interrupted, seen = [], []
    for step in range(NUM_STEPS):
        change(model, step)
        generator = torch.Generator().manual_seed(2 * step + rank)
        if step in left_out:
            continue
        try:
            loss = model(torch.randn(3, 4, generator=generator)).square().mean()
            loss.backward()
        except (KeyboardInterrupt, ValueError):
            interrupted.append(step)
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    graphs = engine_of(model).graphs
    seen += shardwise.full_state_dict(model)["model"].values()
    return interrupted, seen, graphs.num_replayed if graphs is not None else 0


@contextmanager
def raising(owner: type, name: str, *, at: int) -> Iterator[None]:
    """Have Ctrl-C arrive in the call of a method that has this number."""
    own, numbers = getattr(owner, name), iter(range(1000))

    def method(*given: Any, **options: Any) -> Any:
        if next(numbers) == at:
            raise KeyboardInterrupt
        return own(*given, **options)

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, own)


INTERRUPTED = {
    "trace": (Tracer, "_backend", 0),
    "forward": (SimulatedGraphs, "record", 1),
    "backward": (SimulatedGraphs, "record", 4),
}


def with_an_interrupt(rank: int, where: str) -> tuple[int, int]:
    owner, name, at = INTERRUPTED[where]
    with simulated(moved=0.0), raising(owner, name, at=at):
        interrupted, seen, num_replayed = trained(rank)
    _, expected, _ = trained(rank, left_out=tuple(interrupted))
    assert all(map(torch.equal, seen, expected))
    return len(interrupted), num_replayed


@pytest.mark.timeout(120)
@pytest.mark.parametrize("where", sorted(INTERRUPTED))
def test_an_interrupt_ends_the_step_and_later_steps_are_right_and_replayed(where: str) -> None:
    for num_interrupted, num_replayed in run_ranks(with_an_interrupt, num_ranks=2, args=(where,)):
        assert num_interrupted == 1
        assert num_replayed > 0


def with_a_hook(rank: int) -> int:
    """The hook of an inner layer raises in steps that would be ordinary, traced, recorded and replayed."""
    raises = (1, 3, 5, 6, 14)

    def hook(model: nn.Module, step: int) -> None:
        def look(module: nn.Module, given: Any, found: Tensor) -> None:
            if model.step in raises:
                raise ValueError("as a hook may")

        if step == 0:
            model.blocks[1].inner.register_forward_hook(look)  # type: ignore[union-attr, index]
        model.step = step  # type: ignore[assignment]

    expected_interrupted, expected, _ = trained(rank, change=hook)
    with simulated(moved=0.0):
        interrupted, seen, num_replayed = trained(rank, change=hook)
    assert interrupted == expected_interrupted == list(raises)
    assert all(map(torch.equal, seen, expected))
    return num_replayed


@pytest.mark.timeout(120)
def test_a_hook_that_raises_ends_the_step_that_it_would_end_without_graphs() -> None:
    for num_replayed in run_ranks(with_a_hook, num_ranks=2):
        assert num_replayed > 0


def refused(rank: int) -> tuple[int, str]:
    _, expected, _ = trained(rank, kind=Disabled)
    with simulated(moved=0.0) as lines:
        _, seen, num_replayed = trained(rank, kind=Disabled)
    assert all(map(torch.equal, seen, expected))
    return num_replayed, " ".join(lines)


@pytest.mark.timeout(120)
def test_a_class_that_torch_does_not_trace_is_ordinary_among_graphs_and_a_line_says_so() -> None:
    for num_replayed, said in run_ranks(refused, num_ranks=2):
        assert num_replayed > 0
        assert "Disabled: torch.compile makes no graph of it" in said


def flipped(rank: int) -> int:
    def flip(model: nn.Module, step: int) -> None:
        model.blocks[1].factor = 0.5 if step in (13, 14, 16) else 1.0  # type: ignore[union-attr, index, assignment]

    _, expected, _ = trained(rank, change=flip)
    with simulated(moved=0.0):
        _, seen, num_replayed = trained(rank, change=flip)
    assert all(map(torch.equal, seen, expected))
    return num_replayed


@pytest.mark.timeout(120)
def test_a_flag_that_a_unit_reads_and_the_user_changes_is_read() -> None:
    for num_replayed in run_ranks(flipped, num_ranks=2):
        assert num_replayed > 0
