"""A training that outlives a lack of memory: the step is undone, and runs again under a plan that needs less.

In forward and backward the run continues (engine/out_of_memory/survive.py). In an update it ends, with the smaller plan
in the run folder: the next start resumes under it. What was chosen as `auto` is solved again with less memory; a fixed
plan is changed as little as possible. Either may split the passes of a step (undercut.py): then the samples of the step
are read again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.join import Place
from shardwise.engine.optimizer.allocate import allocate_states
from shardwise.engine.out_of_memory.survive import StepGuard, StepUndone
from shardwise.engine.out_of_memory.surviving import NotSurvived, Surviving
from shardwise.engine.protocol import require_engine
from shardwise.errors import ShardwiseError
from shardwise.plan import Plan
from shardwise.train import run_folder
from shardwise.train.auto_plan import ChosenPlan, source_of
from shardwise.train.automatic import job_cluster, solved_by_rank_0
from shardwise.train.loop import Training, next_passes, update
from shardwise.train.randomness import random_states, restore_random_states
from shardwise.train.setup import open_batches
from shardwise.train.undercut import Undercutting
from shardwise.train.what_fits import optimizer_rule

_MOST_IF_AUTO = 3


@dataclass(slots=True, kw_only=True)
class SmallerPlans:
    """The plans of a run, each smaller than the one before. Of the last one: `cost`, what is predicted in words, and
    `predicted_bytes`; on the rank that found it.
    """

    chosen: ChosenPlan
    place: Place
    cost: str = ""
    predicted_bytes: int | None = None

    @property
    def most(self) -> int:
        given = self.chosen.given
        if given.train.survive is not None:
            return given.train.survive
        # Guarded steps are not captured: where they could be, it has to be asked for.
        return _MOST_IF_AUTO if given.plan.is_auto and not self.chosen.may_capture(self.place.device) else 0

    def next(self) -> Plan:
        """On every rank, as rank 0 finds it; NotSurvived if there is none. Collective."""
        plan = solved_by_rank_0(self.find)
        self.chosen = self.chosen.replaced(plan, place=self.place, predicted_bytes=self.predicted_bytes)
        return plan

    def find(self) -> Plan:
        """On this rank alone, which draws no random numbers for it."""
        states = random_states(self.place.device)
        try:
            return self._find()
        finally:
            restore_random_states(states, device=self.place.device)

    def _find(self) -> Plan:
        config = self.chosen.config
        cluster = job_cluster(self.place.device, num_ranks=self.place.num_ranks)
        source = self.chosen.source or source_of(config, cluster=cluster)
        self.chosen = replace(self.chosen, source=source)
        undercutting = Undercutting(
            spec_for=source.spec_for,
            cluster=cluster,
            optimizer=optimizer_rule(config.optimizer, device=self.place.device.type),
            goal=config.auto.goal,
            mesh=self.chosen.given.plan.mesh,
            solves=self.chosen.given.plan.is_auto,
        )
        undercut = undercutting.of(config.plan)
        source.release()
        if undercut.found is None:
            raise NotSurvived("there is no plan that needs less memory, so the job ends")
        self.cost, self.predicted_bytes = undercut.cost, undercut.found.memory.allocated_bytes
        return undercut.found.plan

    def note(self) -> None:
        """Into the run folder: the plan that a later start uses."""
        run_folder.note_plan(self.chosen.config)
        self.chosen.note()


def follow_plan(training: Training, *, plan: Plan) -> None:
    """From here on the passes are those of the plan. The samples of the step that is under way are read again."""
    assert plan.micro_batch is not None
    training.config = replace(training.config, plan=plan)
    training.sharing = replace(training.sharing, micro_batch=plan.micro_batch, accumulate=plan.accumulate)
    open_batches(training)


class SurvivingUpdate:
    """An ordinary update, not captured, that runs again if a rank has run out of memory in it."""

    def __init__(self, *, plans: SmallerPlans, surviving: Surviving) -> None:
        self._plans = plans
        self._surviving = surviving

    def __call__(
        self, training: Training, weights: tuple[float, ...], batches: list[Any]
    ) -> tuple[Tensor, Tensor | None]:
        while True:
            try:
                return update(training, weights, batches)
            except StepUndone as undone:
                before, plan = training.config.plan, self._surviving.shrink(undone)
                training.config = replace(training.config, plan=plan)
                if self._plans.place.rank == 0:
                    self._plans.note()
                if (plan.micro_batch, plan.accumulate) != (before.micro_batch, before.accumulate):
                    assert training.before_read is not None
                    # Datasets may draw random numbers.
                    restore_random_states(training.before_read, device=training.device)
                    follow_plan(training, plan=plan)
                    passes = next_passes(training)
                    weights, batches = passes.weights, passes.batches
            except torch.OutOfMemoryError as error:
                error.add_note(f"  {self._leave_smaller()}")
                raise

    def _leave_smaller(self) -> str:
        """On the rank that failed, whatever the others do: they cannot be asked any more."""
        plans = self._plans
        try:
            plan = plans.find()
            plans.chosen = plans.chosen.replaced(plan, place=plans.place, predicted_bytes=plans.predicted_bytes)
            plans.note()
        except (ShardwiseError, OSError) as failed:
            return f"no smaller plan was left in the run folder: {failed}"
        return "a smaller plan is in the run folder: rerun the same command to resume under it"


def let_survive(training: Training, *, chosen: ChosenPlan, place: Place, tell: Callable[[str], None]) -> None:
    """From here on a step of this training outlives a lack of memory, as often as its config says."""
    plans = SmallerPlans(chosen=chosen, place=place)
    if not plans.most or not require_engine(training.model).can("step", training.model, argument="survive"):
        return
    allocate_states(training.optimizer)
    training.guard = StepGuard(training.model)
    surviving = Surviving(training.model, most=plans.most, smaller=plans.next, tell=tell, cost=lambda: plans.cost)
    training.update = SurvivingUpdate(plans=plans, surviving=surviving)
