"""Parameters that get no gradient though their unit runs: they stay as they are, as in one process of plain torch."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from ranks import run_ranks
from simulated_graphs import simulated
from torch import Tensor, nn

import shardwise
from shardwise.engine.engine import engine_of
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES

WIDTH = 4
STEPS = 12
PASSES = 2


class _Product(torch.autograd.Function):
    """x · wᵀ; unless it is trained, the weight's gradient is None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, trains: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.trains = trains
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x if ctx.trains else None, None


class _Rounded(torch.autograd.Function):
    """Rounds; what comes before it gets a gradient only if that is trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trains: bool) -> Tensor:
        ctx.trains = trains
        return x.mul(8).round().div(8)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        return grad if ctx.trains else None, None


class Block(nn.Module):
    """Two layers, and an odd one whose weight gets a gradient only while `trains`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.odd, self.other = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.trains = False

    def forward(self, x: Tensor) -> Tensor:
        return x + self.odd_part(torch.tanh(self.first(x)))

    def odd_part(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class NoneFromFunction(Block):
    def odd_part(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.odd.weight, self.trains) + self.other(x)  # type: ignore[no-any-return, no-untyped-call]


class BehindFunction(Block):
    def odd_part(self, x: Tensor) -> Tensor:
        return _Rounded.apply(self.odd(x), self.trains) + self.other(x)  # type: ignore[no-any-return, no-untyped-call]


class WholeUnitBehindFunction(Block):
    """All layers of the unit are behind a function outside of it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.odd(torch.tanh(self.first(x))))


class NeverCalled(Block):
    def odd_part(self, x: Tensor) -> Tensor:
        return self.odd(self.other(x)) if self.trains else self.other(x)  # type: ignore[no-any-return]


class IdleExpert(Block):
    def odd_part(self, x: Tensor) -> Tensor:
        return (self.odd if self.trains else self.other)(x)  # type: ignore[no-any-return]


class WithoutGradients(Block):
    def odd_part(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.trains):
            odd = self.odd(x)
        return odd + self.other(x)  # type: ignore[no-any-return]


class UnusedInput(Block):
    """A product of the block before is given to this one, which uses it only while it trains."""

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, odd = x
        x = x + self.other(torch.tanh(self.first(x)))
        # The function would give its weight zeros for None.
        return x + odd if self.trains else x, _Product.apply(x, self.odd.weight, True)  # type: ignore[no-untyped-call]


BLOCKS = (
    NoneFromFunction,
    BehindFunction,
    WholeUnitBehindFunction,
    NeverCalled,
    IdleExpert,
    WithoutGradients,
    UnusedInput,
)

# When the odd layers are trained: by rank, step and pass.
TRAINS: dict[str, Callable[[int, int, int], bool]] = {
    "never": lambda rank, step, part: False,
    "on one rank": lambda rank, step, part: rank == 1,
    "in one pass": lambda rank, step, part: part == 0,
    "in the other pass of one rank": lambda rank, step, part: rank == 0 and part == 1,
    "no longer": lambda rank, step, part: step < STEPS // 2,
}


class Model(nn.Module):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        odd = torch.zeros_like(x)
        for block in self.blocks:
            if isinstance(block, UnusedInput):
                x, odd = block((x, odd))
            elif isinstance(block, WholeUnitBehindFunction):
                x = x + _Rounded.apply(block(x), block.trains)  # type: ignore[no-untyped-call]
            else:
                x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def loss_of(model: Model, *, when: str, rank: int, step: int, part: int) -> Tensor:
    trains = TRAINS[when](rank, step, part)
    for block in model.blocks:
        block.trains = trains
    # Of another form, so that there are graphs of both.
    x = torch.randn(3 if trains else 5, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))
    return model(x).square().mean() / PASSES  # type: ignore[no-any-return]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def in_one_process(rank: int, kind: type[Block], when: str, num_ranks: int) -> dict[str, Tensor]:
    """Each rank's passes summed, then the ranks; what got no gradient on any of them keeps None."""
    model = Model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        of_ranks: list[list[Tensor | None]] = []
        for other in range(num_ranks):
            model.zero_grad()
            for part in range(PASSES):
                loss_of(model, when=when, rank=other, step=step, part=part).backward()
            of_ranks.append([parameter.grad for parameter in model.parameters()])
        for parameter, *grads in zip(model.parameters(), *of_ranks, strict=True):
            found = [grad for grad in grads if grad is not None]
            parameter.grad = torch.stack(found).sum(0) * (1 / num_ranks) if found else None
        optimizer.step()
    return weights_of(model)


def trained(model: Model, *, when: str, rank: int, options: dict[str, Any]) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    shardwise.prepare(model, optimizer, Plan(units="class:" + type(model.blocks[0]).__name__, **options))
    for step in range(STEPS):
        for part in range(PASSES):
            with shardwise.accumulate(model, enabled=part + 1 < PASSES):
                loss_of(model, when=when, rank=rank, step=step, part=part).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(shardwise.full_state_dict(model)["model"])


def on_ranks(
    rank: int, kind: type[Block], when: str, options: dict[str, Any], graphs: bool
) -> tuple[dict[str, Tensor], int]:
    with simulated(at_once=True) if graphs else nullcontext():
        model = Model(kind)
        found = trained(model, when=when, rank=rank, options=options)
    held = engine_of(model).graphs
    return found, held.num_replayed if held is not None else 0


def compare(kind: type[Block], when: str, *, strategy: str, num_ranks: int, graphs: bool) -> None:
    (expected,) = run_ranks(in_one_process, num_ranks=1, args=(kind, when, num_ranks))
    for found, num_replayed in run_ranks(
        on_ranks, num_ranks=num_ranks, args=(kind, when, {"strategy": strategy}, graphs)
    ):
        for name, weight in expected.items():
            assert torch.equal(found[name], weight), (name, float((found[name] - weight).abs().max()))
        assert num_replayed > STEPS or not graphs, num_replayed


_LEDGER = pytest.mark.ledger("gradient-is-none", outcome="right")


def cases() -> list[Any]:
    """Each block under each strategy; the usual run tries each pair with one of the ways in which it is trained."""
    found = []
    ways = [(when, graphs) for graphs in (False, True) for when in TRAINS]
    for number, (kind, strategy) in enumerate(product(BLOCKS, STRATEGIES)):
        chosen = ways[number * 3 % len(ways)]
        for when, graphs in ways:
            num_ranks = 2 if "rank" in when else 1 + number % 2
            name = f"{kind.__name__}-{strategy}-{when}-{'graphs' if graphs else 'eager'}-{num_ranks}"
            marks = [_LEDGER] if (when, graphs) == chosen else [pytest.mark.whole]
            found.append(pytest.param(kind, strategy, when, graphs, num_ranks, id=name, marks=marks))
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("kind", "strategy", "when", "graphs", "num_ranks"), cases())
def test_a_weight_without_a_gradient_has_the_bits_of_one_process(
    kind: type[Block], strategy: str, when: str, graphs: bool, num_ranks: int
) -> None:
    compare(kind, when, strategy=strategy, num_ranks=num_ranks, graphs=graphs)


class Wide(nn.Module):
    """A layer that is computed by a function of the engine, behind one that gives it no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.other = (nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return _Rounded.apply(self.odd(x), False) + self.other(x)  # type: ignore[no-any-return, no-untyped-call]


def moved(rank: int, options: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether the odd layer has moved, and the other one."""
    torch.manual_seed(0)
    model = nn.Sequential(Wide())
    before = weights_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    shardwise.prepare(model, optimizer, Plan(units="class:Wide", **options))
    for step in range(2):
        model(torch.randn(2, 32, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = shardwise.full_state_dict(model)["model"]
    odd, other = (not torch.equal(before[name], after[name]) for name in ("0.odd.weight", "0.other.weight"))
    return odd, other


COMPUTED_BY_US: dict[str, dict[str, Any]] = {
    "tiles": {"tile": {"*.odd": 16}},
    "fp8": {"precision": "fp8", "strategy": "ddp", "fp8_min_features": 16},
    "fp8 by rows": {"precision": "fp8", "fp8_recipe": "rowwise", "fp8_min_features": 16},
    "fp8, gathered": {"precision": "fp8", "strategy": "fsdp", "fp8_min_features": 16},
}


@pytest.mark.parametrize("name", COMPUTED_BY_US)
def test_a_layer_in_tiles_or_in_fp8_gets_no_gradient_where_torchs_own_gets_none(name: str) -> None:
    num_ranks = 2 if "gathered" in name else 1
    assert set(run_ranks(moved, num_ranks=num_ranks, args=(COMPUTED_BY_US[name],))) == {(False, True)}
