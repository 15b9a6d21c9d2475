"""Which steps of an optimizer are steps inside another one, also after steps that raised."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardwise import Plan, prepare
from shardwise.comm.job.absent import AbsentCollectives, absent_group
from shardwise.engine.core import optimizer_slices
from shardwise.engine.engine import engine_of


class StepError(RuntimeError):
    """Raised by an optimizer."""


class Nested(torch.optim.SGD):
    """Calls its parent's step, whose hooks torch calls as well, in ways that are chosen for the next step."""

    how = "once"

    def step(self, closure: Any = None) -> Any:
        how, self.how = self.how, "once"
        if how == "raises before":
            raise StepError
        if how == "catches":
            with pytest.raises(StepError):
                self._parent(raises=True)
        loss = self._parent(closure)
        if how == "raises after":
            raise StepError
        return loss

    def _parent(self, closure: Any = None, *, raises: bool = False) -> Any:
        def fail() -> None:
            raise StepError

        return super().step(fail if raises else closure)


Prepared = tuple[nn.Module, torch.optim.Optimizer, list[str]]


@pytest.fixture(params=[Nested, torch.optim.SGD])
def prepared(request: pytest.FixtureRequest) -> Iterator[Prepared]:
    """A model, its optimizer, and what the core was told of its updates."""
    # torch gives the hooks to SGD.step when a plain one is made.
    torch.optim.SGD([torch.zeros(1)])
    with absent_group(1):
        model = nn.Linear(4, 4)
        optimizer = request.param(model.parameters(), lr=0.1)
        prepare(model, optimizer, Plan(strategy="ddp"), collectives=AbsentCollectives())
        told: list[str] = []
        events = engine_of(model).core.setting.events
        events.update_begins.append(lambda: told.append("begins"))
        events.values_written.append(lambda: told.append("ended"))
        yield model, optimizer, told


def step(prepared: Prepared, *, how: str = "once") -> list[str]:
    """Take a step; what the core was told meanwhile."""
    model, optimizer, told = prepared
    told.clear()
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    if isinstance(optimizer, Nested):
        optimizer.how = how
    if how.startswith("raises"):
        with pytest.raises(StepError):
            optimizer.step()
    else:
        optimizer.step()
    return list(told)


@pytest.mark.parametrize("prepared", [Nested], indirect=True)
@pytest.mark.parametrize("how", ["raises before", "raises after"])
def test_the_step_after_one_that_raised_is_not_taken_for_a_step_inside_it(prepared: Prepared, how: str) -> None:
    assert step(prepared) == ["begins", "ended"]
    for _ in range(2):
        assert step(prepared, how=how) == ["begins"]
    for _ in range(2):
        assert step(prepared) == ["begins", "ended"]


@pytest.mark.parametrize("prepared", [Nested], indirect=True)
def test_a_step_ends_also_if_it_has_caught_the_error_of_a_step_inside_it(prepared: Prepared) -> None:
    for how in ("catches", "once", "catches"):
        assert step(prepared, how=how) == ["begins", "ended"]


@pytest.mark.parametrize("prepared", [torch.optim.SGD], indirect=True)
def test_an_ordinary_step_does_not_look_at_the_stack(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Callable[..., Any]] = []
    monkeypatch.setattr(optimizer_slices, "_is_inside_step", looks.append)
    for _ in range(3):
        assert step(prepared) == ["begins", "ended"]
    assert looks == []
