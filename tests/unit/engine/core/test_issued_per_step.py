"""What a step of the engine issues of its own, counted: what could be made once is not made in every step."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import Plan, prepare
from shardwise.comm.job.absent import absent_group

NUM_UNITS = 3


class Count(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.operations[str(function).rpartition(".")[0]] += 1
        return function(*arguments, **(options or {}))


@pytest.fixture
def counted() -> Iterator[Count]:
    """A third step under fsdp of a rank of two, the other of which is absent."""
    with absent_group(2):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(NUM_UNITS)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = Plan(strategy="fsdp", units="class:Linear", precision="bf16")
        prepare(model, optimizer, plan, compare_every=0)
        for _ in range(2):
            step(model, optimizer)
        with Count() as count:
            step(model, optimizer)
        yield count


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_gathers_and_reduces_without_cutting_slices(counted: Count) -> None:
    # The last unit that forward calls is not freed, so that backward does not gather it.
    assert counted.operations["c10d._allgather_base_"] == 2 * NUM_UNITS - 1
    assert counted.operations["aten.slice"] == 0


def test_an_update_of_replicated_parameters_is_cast_in_one_operation() -> None:
    with absent_group(2):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(NUM_UNITS)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = Plan(strategy="ddp", units="class:Linear", precision="bf16")
        prepare(model, optimizer, plan, compare_every=0)
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            with Count() as count:
                optimizer.step()
        assert count.operations["aten._foreach_copy_"] == 1
        assert count.operations["aten.copy_"] == 0
