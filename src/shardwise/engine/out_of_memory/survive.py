"""Survives steps that run out of memory: undoes them on all ranks before any updates, and shrinks the plan.

    guard.begin()
    for batch in batches:
        loss = guard.run(lambda: one_pass(batch))      # None on a rank that has run out
    guard.agree()                                      # raises StepUndone on all ranks
    optimizer.step()

A rank that runs out in forward or backward drops its graph and takes part in the rest (Core.finish_pass). `Surviving`
then gives the model a plan that needs less memory, and the step runs again.
"""

import gc
import time
import traceback
import warnings
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.comm.groups import num_collectives
from shardwise.engine.engine import engine_of
from shardwise.engine.out_of_memory.undo import StepStart
from shardwise.engine.plan_change.replan import replan
from shardwise.errors import ShardwiseError
from shardwise.plan import Plan


class StepUndone(ShardwiseError):  # noqa: N818
    """Ranks ran out of memory in a step, which was undone on all of them. `failures`: one line by rank."""

    def __init__(self, failures: Mapping[int, str]) -> None:
        super().__init__("; ".join(failures.values()))
        self.failures = dict(failures)


class NotSurvived(ShardwiseError):  # noqa: N818
    """Memory ran out too often, or no plan needs less."""


class NoGuard:
    """Steps whose errors end the job. `undoes`: whether a step may be undone and run again."""

    undoes = False

    def begin(self) -> None: ...

    def run(self, one_pass: Callable[[], Tensor]) -> Tensor | None:
        return one_pass()

    def agree(self) -> None: ...


class StepGuard(NoGuard):
    """The steps of one model."""

    undoes = True

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._engine = engine_of(model)
        self._start: StepStart | None = None
        # Collectives that the user's code has issued in the passes of the last step, in the job's default group.
        self._num_foreign = 0
        self._num_before = 0

    @classmethod
    def after_allocating(cls, model: nn.Module, optimizer: Optimizer) -> "StepGuard":
        """Return a guard; allocate the optimizer's state first, as an update cannot be undone."""
        guard = cls(model)
        guard._engine.owned.streamed.allocate_others(optimizer)
        return guard

    def begin(self) -> None:
        self._start = StepStart(self._model, self._engine)
        self._num_before = self._num_of_others()

    def run(self, one_pass: Callable[[], Tensor]) -> Tensor | None:
        """Run a forward and its backward; after this rank has run out of memory, take part in those of the others."""
        core = self._engine.core
        passes = core.passes
        if not passes.failed:
            try:
                return one_pass()
            except torch.OutOfMemoryError as error:
                if self._num_foreign or core.num_forwards > 1:
                    error.add_note(
                        "  this step could not be undone: its passes have collectives of their own, or more than one "
                        "forward; the other ranks wait for them"
                    )
                    raise
                passes.failed = _describe(error)
                # The frames of the traceback keep the activations so far alive.
                traceback.clear_frames(error.__traceback__)
        gc.collect()
        core.finish_pass()
        return None

    def agree(self) -> None:
        """Undo the step and raise StepUndone if any rank has run out of memory: after the passes, before the update."""
        engine = self._engine
        failures = engine.guards.same_order.take_failures()
        engine.core.passes.failed = ""
        if not failures:
            was_learned = self._start is not None and self._start.learned
            self._num_foreign = self._num_of_others() - self._num_before if was_learned else 0
            return
        assert self._start is not None
        self._start.undo()
        raise StepUndone(failures)

    def _num_of_others(self) -> int:
        """Return the number of collectives in the job's group that are not the engine's."""
        return num_collectives() - self._engine.groups.world.log.num_noted

    def drop(self) -> None:
        """Undo a step in which no rank has failed, instead of its update: it was a rehearsal."""
        assert self._start is not None
        self._start.undo(keeps_order=True)

    @property
    def copied_bytes(self) -> int:
        """Device memory of the copies that are needed to undo a step."""
        return self._start.copied_bytes if self._start is not None else 0


def _describe(error: torch.OutOfMemoryError) -> str:
    """Return the first line of the engine's explanation (out_of_memory.py)."""
    notes = getattr(error, "__notes__", None) or [f"rank {dist.get_rank()} ran out of memory"]
    return str(notes[0]).splitlines()[0]


class Surviving:
    """The plans of one model, each smaller than the one before.

    most      the largest number of changes
    smaller   returns the next plan, the same on every rank; None if there is none
    tell      receives a line, on rank 0
    cost      the prediction for the last plan that `smaller` returned, in a few words
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
