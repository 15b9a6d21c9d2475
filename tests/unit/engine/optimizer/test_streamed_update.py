"""Updates through the device: what is in flight, and what is read."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import Plan
from shardwise.engine.engine import engine_of
from shardwise.engine.optimizer import streamed_update


@pytest.fixture(autouse=True)
def group() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stepped(**options: Any) -> tuple[Any, Any]:
    """Return the engine and the optimizer of a model after its first step, whose update counts as in flight."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    shardwise.prepare(model, optimizer, Plan(offload_states=True))
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return engine_of(model), optimizer


def test_where_streams_meet_updates_keep_nothing() -> None:
    engine, _ = stepped()
    (flat,) = engine.core.flats
    assert flat.master.in_use is not None
    engine.owned.streamed.join()
    assert flat.master.in_use is None
    # Whatever reads host memory still waits.
    assert flat.master.update is not None
    assert all(slot.sent is None and slot.kept is None for slot in engine.owned.streamed._slots)


def test_an_update_in_flight_reads_a_copy_of_a_rate_that_a_schedule_may_write() -> None:
    rate = torch.tensor(1e-2)
    seen: list[Any] = []

    def step(optimizer: torch.optim.Optimizer) -> None:
        seen.append(optimizer.param_groups[0]["lr"])
        original(optimizer)

    original = streamed_update.plain_step
    with patch.object(streamed_update, "plain_step", step):
        stepped(lr=rate, foreach=False)
    assert [one.item() for one in seen] == [rate.item()]
    assert seen[0] is not rate
