"""A training that outlives a lack of memory: the step is undone, and runs again under a plan that needs less.

In forward and backward the run continues (engine/prepared/survive.py). In an update it ends, with the smaller plan in
the run folder: the next start resumes under it. What was chosen as `auto` is solved again with less memory; a fixed
plan is changed as little as possible.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardwise.automatic import job_cluster, solved_by_rank_0
from shardwise.comm.join import Place
from shardwise.engine.engine import is_prepared
from shardwise.engine.optimizer.allocate import allocate_states
from shardwise.engine.prepared.survive import StepGuard, StepUndone
from shardwise.engine.smaller_plan import replannable
from shardwise.engine.surviving import NotSurvived, Surviving
from shardwise.errors import ShardwiseError
from shardwise.plan import Plan
from shardwise.planner.search.auto import AutoRequest, NoPlanFits, solve_plan
from shardwise.planner.search.candidates import Candidate, cost
from shardwise.sources import Source
from shardwise.train import run_folder
from shardwise.train.auto_plan import ChosenPlan
from shardwise.train.loop import Training, update
from shardwise.train.randomness import random_states, restore_random_states
from shardwise.train.what_fits import optimizer_rule

# What a plan must at least be undercut by.
_LESS = 0.9
_MOST_IF_AUTO = 3


@dataclass(slots=True, kw_only=True)
class SmallerPlans:
    """The plans of a run, each smaller than the one before. `cost`: what is predicted of the last one."""

    chosen: ChosenPlan
    place: Place
    cost: str = ""

    @property
    def most(self) -> int:
        given = self.chosen.given
        if given.train.survive is not None:
            return given.train.survive
        # Guarded steps are not captured: where they could be, it has to be asked for.
        may_capture = self.place.device.type == "cuda" and given.plan.capture != "off"
        return _MOST_IF_AUTO if given.plan.is_auto and not may_capture else 0

    def next(self) -> Plan:
        """On every rank, as rank 0 finds it; NotSurvived if there is none. Collective."""
        plan = solved_by_rank_0(self.find)
        self.chosen = self.chosen.replaced(plan, place=self.place)
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
        kind = self.place.device.type
        source = Source(config.task.model, seq=config.task.seq, image=config.task.image, kernels=kind)
        cluster = job_cluster(self.place.device, num_ranks=self.place.num_ranks)
        rule = optimizer_rule(config.optimizer, device=kind)

        def costed(plan: Plan) -> Candidate:
            return cost(source.spec_for(plan), plan=plan, cluster=cluster, optimizer=rule)

        before = costed(config.plan)
        most = int(_LESS * before.memory.device_bytes)
        if self.chosen.given.plan.is_auto:
            # Each pass stays as it is.
            given = replace(config.plan, mesh=self.chosen.given.plan.mesh)
            request = AutoRequest(plan=given, cluster=cluster, optimizer=rule, budget_bytes=most, goal=config.auto.goal)
            try:
                found: Candidate | None = solve_plan(source.spec_for, request=request).candidate
            except NoPlanFits:
                found = None
        else:
            changed = (costed(plan) for plan in replannable(config.plan))
            found = next((one for one in changed if one.memory.device_bytes <= most), None)
        if found is None:
            raise NotSurvived("there is no plan that needs less memory, so the job ends")
        self.cost = _predicted(before, found)
        return found.plan

    def note(self) -> None:
        """Into the run folder: the plan that a later start uses."""
        run_folder.note_plan(self.chosen.config)
        self.chosen.note()


def _predicted(before: Candidate, found: Candidate) -> str:
    share = found.memory.device_bytes / before.memory.device_bytes
    memory = f"predicted {share:.2f} × the memory"
    if before.time is None or found.time is None:
        return f"{memory}, "
    return f"{memory} and {found.time.samples_per_s / before.time.samples_per_s:.2f} × the speed, "


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
                plan = self._surviving.shrink(undone)
                training.config = replace(training.config, plan=plan)
                if self._plans.place.rank == 0:
                    self._plans.note()
            except torch.OutOfMemoryError as error:
                error.add_note(f"  {self._leave_smaller()}")
                raise

    def _leave_smaller(self) -> str:
        """On the rank that failed, whatever the others do: they cannot be asked any more."""
        plans = self._plans
        try:
            plans.chosen = plans.chosen.replaced(plans.find(), place=plans.place)
            plans.note()
        except (ShardwiseError, OSError) as failed:
            return f"no smaller plan was left in the run folder: {failed}"
        return "a smaller plan is in the run folder: rerun the same command to resume under it"


def let_survive(training: Training, *, chosen: ChosenPlan, place: Place, tell: Callable[[str], None]) -> None:
    """From here on a step of this training outlives a lack of memory, as often as its config says."""
    plans = SmallerPlans(chosen=chosen, place=place)
    if not plans.most or not is_prepared(training.model):
        return
    allocate_states(training.optimizer)
    training.guard = StepGuard(training.model)
    surviving = Surviving(training.model, most=plans.most, smaller=plans.next, tell=tell, cost=lambda: plans.cost)
    training.update = SurvivingUpdate(plans=plans, surviving=surviving)
