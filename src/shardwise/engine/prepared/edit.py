"""Writes into what a rank's optimizer steps, of which the other ranks are told."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.engine.core.flat_buffers import refresh
from shardwise.engine.core.runner import Runner
from shardwise.plan.placement import SHARDED


@contextmanager
def editing(runner: Runner) -> Iterator[None]:
    """What is written in here, every copy on every rank follows. Collective."""
    runner.wait_gathers()
    runner.writes.settle()
    yield
    runner.writes.settle(announced=True)
    distribute(runner)


@torch.no_grad()
def distribute(runner: Runner) -> None:
    """New values have come into the owned slices: whatever else holds them follows. Collective.

    A backward through a forward of before is torch's error, as after an update.
    """
    for unit in runner.units.values():
        unit.refilled()
        for flat in unit.flats:
            if flat.placement.params is SHARDED:
                continue
            if flat.placement.optim is SHARDED:
                flat.gather()
                flat.wait_gather()
            else:
                refresh([flat])
    torch.autograd.graph.increment_version([p for unit in runner.units.values() for p in unit.params()])
    runner.writes.settled()
