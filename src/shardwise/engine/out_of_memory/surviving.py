"""What follows on a step that was undone for want of memory: a plan that needs less, a few times at most."""

import time
import warnings
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from shardwise.engine.engine import engine_of
from shardwise.engine.out_of_memory.survive import StepUndone
from shardwise.engine.plan_change.replan import replan
from shardwise.errors import ShardwiseError
from shardwise.plan import Plan


class NotSurvived(ShardwiseError):  # noqa: N818
    """Memory ran out too often, or no plan needs less."""


class Surviving:
    """The plans of one model, each smaller than the one before.

    most      how often
    smaller   gives the next plan, the same on every rank; None if there is none
    tell      is given a line, on rank 0
    cost      what is predicted of the last plan that `smaller` gave, in a few words
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        most: int,
        smaller: Callable[[], Plan | None],
        tell: Callable[[str], None],
        cost: Callable[[], str] = str,
    ) -> None:
        self._model = model
        self._most = most
        self._smaller = smaller
        self._tell = tell
        self._cost = cost
        self._count = 0

    def shrink(self, undone: StepUndone) -> Plan:
        """Give the model the next plan. Collective: the step was undone on all ranks."""
        if self._count == self._most:
            raise NotSurvived(f"{undone}; it has happened more than {self._most} times, so the job ends") from undone
        self._count += 1
        before = engine_of(self._model).plan
        try:
            plan = self._smaller()
            if plan is None:
                raise NotSurvived("there is no plan that needs less memory, so the job ends")
            began = time.monotonic()
            replan(self._model, plan)
        except ShardwiseError as error:
            raise NotSurvived(f"{undone}; {error}") from undone
        if dist.get_rank() == 0:
            changed = ", ".join(f"{name} = {value!r}" for name, value in _changes(before, plan).items())
            self._tell(
                f"{undone}: the step is undone and runs again with {changed} ({self._cost()}moved in "
                f"{time.monotonic() - began:.1f} s; {self._count} of at most {self._most} times)"
            )
        return plan


def _changes(before: Plan, plan: Plan) -> dict[str, object]:
    then, now = before.to_dict(), plan.to_dict()
    return {name: value for name, value in now.items() if then.get(name) != value}


def warn(line: str) -> None:
    warnings.warn(line, stacklevel=2)
