"""Retry after running out of memory: the step is undone, and runs again under a plan that needs less.

After a failure in forward or backward the run continues (engine/out_of_memory/survive.py). After one in an update it
ends, but the smaller plan is in the run folder, and the next start resumes under it. A plan that splits the passes of
a step (smaller_plan_search.py) reads the samples of the step again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.out_of_memory.survive import NotSurvived, StepUndone, Surviving
from shardwise.engine.protocol import require_engine
from shardwise.engine.random_states import random_states, restore_random_states
from shardwise.errors import ShardwiseError
from shardwise.plan import Plan
from shardwise.train import run_folder
from shardwise.train.auto_plan import ChosenPlan
from shardwise.train.automatic import solved_by_rank_0
from shardwise.train.setup import open_batches
from shardwise.train.smaller_plan_search import SmallerPlanSearch
from shardwise.train.training_state import Training
from shardwise.train.training_step import TrainStep, step_guard
from shardwise.train.update import next_passes, update

_RETRIES_IF_AUTO = 3


@dataclass(slots=True, kw_only=True)
class SmallerPlans:
    """The plans of a run, each smaller than the previous one.

    cost              the predicted cost of the last plan in words; known on the rank that found it
    predicted_bytes   the predicted memory of that plan; the same
    """

    chosen: ChosenPlan
    cost: str = ""
    predicted_bytes: int | None = None

    @property
    def max_retries(self) -> int:
        given = self.chosen.given
        if given.train.survive is not None:
            return given.train.survive
        # Guarded steps are not captured: where they could be, retries must be asked for.
        return _RETRIES_IF_AUTO if given.plan.is_auto and not self.chosen.may_capture else 0

    def survive(self, model: nn.Module, *, most: int, tell: Callable[[str], None]) -> Surviving:
        """Return what moves the model to the next plan, `most` times."""
        return Surviving(model, most=most, smaller=self.next, tell=tell, cost=lambda: self.cost)

    def next(self) -> Plan:
        """Return the next plan, found by rank 0; raise NotSurvived if there is none. Collective."""
        return self._adopt(solved_by_rank_0(self._search))

    def save_next(self) -> None:
        """Find the next plan on this rank alone, and save it for a later start."""
        self._adopt(self._search())
        self.save()

    def _adopt(self, plan: Plan) -> Plan:
        self.chosen = self.chosen.replaced(plan, predicted_bytes=self.predicted_bytes)
        return plan

    def _search(self) -> Plan:
        chosen, device = self.chosen, self.chosen.place.device
        # The search draws random numbers; training must not notice.
        states = random_states(device)
        try:
            source = chosen.traced()
            self.chosen = replace(chosen, source=source)
            search = SmallerPlanSearch(
                spec_for=source.spec_for,
                cluster=chosen.cluster,
                optimizer=chosen.optimizer,
                goal=chosen.config.auto.goal,
                mesh=chosen.given.plan.mesh,
                solves=chosen.given.plan.is_auto,
            )
            smaller = search.run(chosen.config.plan)
            source.release()
        finally:
            restore_random_states(states, device=device)
        if smaller.found is None:
            raise NotSurvived("there is no plan that needs less memory, so the job ends")
        self.cost, self.predicted_bytes = smaller.cost, smaller.found.memory.allocated_bytes
        return smaller.found.plan

    def save(self) -> None:
        """Write the plan into the run folder, for later starts."""
        run_folder.save_plan(self.chosen.config)
        self.chosen.save()


def follow_plan(training: Training, *, plan: Plan) -> None:
    """Split steps into passes as the plan says, and read the samples of the current step again."""
    assert plan.micro_batch is not None
    training.config = replace(training.config, plan=plan)
    training.sharing = replace(training.sharing, micro_batch=plan.micro_batch, accumulate=plan.accumulate)
    open_batches(training)


class RetryingUpdate:
    """An ordinary update that runs again under a smaller plan if a rank ran out of memory in a pass."""

    def __init__(self, *, plans: SmallerPlans, surviving: Surviving) -> None:
        self._plans = plans
        self._surviving = surviving

    def __call__(
        self, training: Training, weights: tuple[float, ...], batches: list[Any]
    ) -> tuple[Tensor, Tensor | None]:
        step = TrainStep(partial(self._update, training), on_undone=partial(self._shrink, training))
        loss = step(weights, batches)
        return loss, step.grad_norm

    def _update(self, training: Training, *inputs: Any) -> tuple[Tensor, Tensor | None]:
        try:
            return update(training, *inputs)
        except torch.OutOfMemoryError as error:
            # The other ranks cannot be asked any more: this one finds the plan alone.
            note = "a smaller plan is in the run folder: rerun the same command to resume under it"
            try:
                self._plans.save_next()
            except (ShardwiseError, OSError) as failed:
                note = f"no smaller plan was left in the run folder: {failed}"
            error.add_note(f"  {note}")
            raise

    def _shrink(self, training: Training, undone: StepUndone, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Move to the next plan; return the same passes, or those of the new plan if it splits them differently."""
        before, plan = training.config.plan, self._surviving.shrink(undone)
        training.config = replace(training.config, plan=plan)
        if self._plans.chosen.place.rank == 0:
            self._plans.save()
        if (plan.micro_batch, plan.accumulate) == (before.micro_batch, before.accumulate):
            return inputs
        assert training.before_read is not None
        # Datasets may draw random numbers.
        restore_random_states(training.before_read, device=training.device)
        follow_plan(training, plan=plan)
        passes = next_passes(training)
        return passes.weights, passes.batches


def retry_out_of_memory(training: Training, *, chosen: ChosenPlan, tell: Callable[[str], None]) -> None:
    """Let the steps of this training run again after running out of memory, as often as its config says."""
    plans = SmallerPlans(chosen=chosen)
    if not plans.max_retries or not require_engine(training.model).can("step", training.model, argument="survive"):
        return
    training.guard = step_guard(training.model, training.optimizer)
    surviving = plans.survive(training.model, most=plans.max_retries, tell=tell)
    training.update = RetryingUpdate(plans=plans, surviving=surviving)
