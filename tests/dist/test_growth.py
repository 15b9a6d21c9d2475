"""What the engine notes of a step does not add up over steps."""

import pytest
import torch
from held import held_now
from ranks import run_ranks
from torch import nn

import shardwise
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES

NUM_STEPS = 60


def grown(rank: int) -> dict[str, tuple[int, int, int]]:
    """Descriptors, objects and entries that are held more after `NUM_STEPS` steps than after half of them."""
    found = {}
    for strategy in STRATEGIES:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        shardwise.prepare(model, optimizer, Plan(strategy=strategy, units="class:Sequential"))
        halfway = held_now()
        for number in range(NUM_STEPS):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == NUM_STEPS // 2:
                halfway = held_now()
        _, descriptors, objects, entries = (end - start for start, end in zip(halfway, held_now(), strict=True))
        found[strategy] = (descriptors, objects, entries)
    return found


@pytest.mark.timeout(120)
def test_no_strategy_holds_more_after_sixty_steps_than_after_thirty() -> None:
    for of_rank in run_ranks(grown, num_ranks=2):
        for strategy, (descriptors, objects, entries) in of_rank.items():
            assert descriptors <= 0, strategy
            # A list that gets one entry in each step would have 30 more.
            assert objects < 10, strategy
            assert entries < 20, strategy
