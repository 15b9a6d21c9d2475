"""Row 20: many steps, many units, many parameters: what grows, and how the step time depends on the units."""

import statistics
import time

import torch
from held import held_now
from ranks import run_ranks
from scorecard import Asked, Tally
from torch import Tensor, nn

import shardwise
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES

WIDTH = 4
NUM_UNITS = 300
"""With 7 parameters each: 2,100."""
# Allocators and thread stacks settle in the first steps; later growth is ours.
_WARM_UP_SHARE = 0.25
_MOST_GROWTH_BYTES = 4 * 2**20
# Four times the units; a quadratic cost would take 16 times as long. Room for a noisy machine.
_MOST_RATIO = 4 * 1.6


class Unit(nn.Module):
    """Seven parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


def many_steps(rank: int, strategy: str, num_units: int, num_steps: int) -> tuple[list[int], float]:
    """Return how much memory, descriptors, objects and entries grew by after the warm-up, and a step's median time.

    Of the main thread on its CPU: other processes may have this machine for a while.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(Unit() for _ in range(num_units)))
    assert len(list(model.parameters())) == 7 * num_units
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    shardwise.prepare(model, optimizer, Plan(strategy=strategy, units="class:Unit"))
    x = torch.randn(2, WIDTH)
    after_warm_up = held_now()
    # As long from the start as at the end: it is counted too.
    times = [0.0] * num_steps
    for number in range(num_steps):
        begun = time.thread_time()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times[number] = time.thread_time() - begun
        if number == int(_WARM_UP_SHARE * num_steps):
            after_warm_up = held_now()
    grown = [end - start for start, end in zip(after_warm_up, held_now(), strict=True)]
    return grown, statistics.median(times)


def endurance(asked: Asked) -> Tally:
    tally = Tally()
    # A step of fsdp sends 900 small messages where ddp sends a few: 200 of its steps show a leak of 50 bytes in each.
    runs = [("ddp", 2000), ("fsdp", 200)] if asked.long else [(asked.chance.choice(list(STRATEGIES)), 200)]
    num_units = asked.pick(short=NUM_UNITS // 10, long=NUM_UNITS)
    for strategy, num_steps in runs:
        with tally.trying(f"{num_steps} steps of {num_units} units, {strategy}"):
            args = (strategy, num_units, num_steps)
            for rank, (grown, _) in enumerate(run_ranks(many_steps, num_ranks=2, args=args, timeout_seconds=2400.0)):
                check_growth(grown, rank=rank)
                tally.found[f"{strategy}, {num_steps:,} steps, rank {rank} grew by"] = f"{grown[0] / 2**20:.1f} MiB"
    num_many = asked.pick(short=NUM_UNITS // 3, long=NUM_UNITS)
    num_few = num_many // 4
    for strategy in ("fsdp", "ddp"):
        with tally.trying(f"step time against units, {strategy}"):
            (_, few), (_, many) = (
                run_ranks(many_steps, num_ranks=2, args=(strategy, num_units, 20), timeout_seconds=900.0)[0]
                for num_units in (num_few, num_many)
            )
            ratio = many / few
            tally.found[f"{strategy}, CPU seconds of a step of {num_many} units / of {num_few}"] = f"{ratio:.2f}"
            assert ratio < _MOST_RATIO, f"{num_many} units take {ratio:.1f} times as long as {num_few}"
    return tally


def check_growth(grown: list[int], *, rank: int) -> None:
    resident, descriptors, objects, entries = grown
    assert resident < _MOST_GROWTH_BYTES, f"rank {rank} grew by {resident / 2**20:.1f} MiB"
    assert descriptors <= 0, f"rank {rank} opened {descriptors} descriptors"
    assert objects < 100, f"rank {rank} holds {objects} objects more"
    assert entries < 100, f"rank {rank} holds {entries} entries of lists, dictionaries and sets more"
