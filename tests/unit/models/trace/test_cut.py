"""Blocks of which only some are traced: also where blocks of two kinds alternate."""

import pytest
import torch
from torch import Tensor, nn

import shardwise.models.trace.trace as traced
from shardwise.models.trace.cut import find_runs
from shardwise.models.trace.trace import trace_model
from shardwise.plan import Plan
from shardwise.planner import estimate
from shardwise.program.spec import ModelSpec

WIDTH = 8


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Alternating(nn.Module):
    """Two blocks of one kind, then one of another, six times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Narrow() if number % 3 == 2 else Wide() for number in range(18))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _spec() -> ModelSpec:
    with torch.device("meta"):
        model = Alternating()
    return trace_model(model, loss=lambda m, x: m(x).sum(), make_batch=lambda size: torch.zeros(size, WIDTH))


def test_alternating_blocks_are_traced_as_if_all_had_been(monkeypatch: pytest.MonkeyPatch) -> None:
    units = {f"blocks.{number}": module for number, module in enumerate(Alternating().blocks)}
    assert [len(run.units) for run in find_runs(units)] == [12, 6]
    found = _spec()
    monkeypatch.setattr(traced, "find_runs", lambda units: ())
    whole = _spec()
    assert found.call_order == whole.call_order
    keys = [[(row.trigger, row.unit, row.stream.ops) for row in spec.traces[0].rows] for spec in (found, whole)]
    assert keys[0] == keys[1]
    for strategy in ("ddp", "zero2", "fsdp"):
        plan = Plan(strategy=strategy, precision="bf16")
        one, other = (estimate(spec, plan=plan, num_ranks=4, batch=64) for spec in (found, whole))
        assert one == other
