"""Before training, a step is rehearsed: if it needs more memory than was predicted, the plan is chosen again.

The passes of the first step run on their own samples, and are undone as those of a step are that ran out of memory
(engine/out_of_memory/undo.py); the samples are read again. So what follows is, bit for bit, what would follow without.
There is no update: it could not be undone without a second copy of parameters and states. The states are there, though.

The largest peak of all ranks counts, in relation to the predicted one. Beyond the planner's error band the budget is
divided by that ratio, rank 0 solves again, and the model moves to the new plan, which is rehearsed in its turn. A rank
that runs out of memory in a rehearsal moves all to a smaller plan, as in training (surviving_update.py).
"""

from dataclasses import dataclass
from functools import partial

import torch

from shardwise.comm.agreement import exchange
from shardwise.comm.join import Place
from shardwise.engine.optimizer.allocate import allocate_states
from shardwise.engine.out_of_memory.survive import StepGuard, StepUndone
from shardwise.engine.out_of_memory.surviving import Surviving
from shardwise.engine.protocol import require_engine
from shardwise.engines import replan
from shardwise.launch.failure import during
from shardwise.plan import Plan
from shardwise.planner.engine_model import engine_model_of
from shardwise.planner.search.auto import NoPlanFits, with_budget
from shardwise.planner.search.candidates import capacity_bytes
from shardwise.profile.step_peak import step_peak
from shardwise.train.auto_plan import ChosenPlan, solve_again
from shardwise.train.automatic import job_cluster, solved_by_rank_0
from shardwise.train.loop import Training, next_passes, run_passes
from shardwise.train.randomness import random_states, restore_random_states
from shardwise.train.surviving_update import SmallerPlans, follow_plan
from shardwise.vocabulary.quantities import bytes_text

# Plans that are moved to at most, for each of both reasons.
_MOST_MOVES = 3
# The first one learns the order of units, and prefetches nothing yet.
_REHEARSALS = 2


def probe_memory(training: Training, *, chosen: ChosenPlan, place: Place) -> ChosenPlan:
    """The plan that training begins with: the chosen one, or one that needs less. Collective."""
    is_auto, is_over = chosen.given.plan.is_auto, training.step >= training.num_steps
    if not is_auto or is_over or not require_engine(training.model).can("replan", training.model):
        return chosen
    # Only rank 0 knows what was predicted, and whether an earlier start has measured it.
    budget = exchange(_budget_to_probe(chosen, place=place))[0]
    if budget is None:
        return chosen
    training.tell("Rehearsing a step, to measure its memory …")
    probe = _Probe(training=training, plans=SmallerPlans(chosen=chosen, place=place), budget_bytes=budget)
    with during("a rehearsal of the first step"):
        return probe.run()


def _budget_to_probe(chosen: ChosenPlan, *, place: Place) -> int | None:
    """On rank 0: what may be used, if a plan was solved for it and has not run yet; else None."""
    if not chosen.given.auto.probe or chosen.predicted_bytes is None or chosen.is_measured:
        return None
    cluster = job_cluster(place.device, num_ranks=place.num_ranks)
    return capacity_bytes(with_budget(cluster, budget_bytes=chosen.given.auto.budget_bytes))


@dataclass(slots=True, kw_only=True)
class _Probe:
    """`ratio`: the largest of measured to predicted so far, and `num_solved`, how often that was solved; on rank 0."""

    training: Training
    plans: SmallerPlans
    budget_bytes: int
    ratio: float = 1.0
    num_solved: int = 0

    def run(self) -> ChosenPlan:
        training, plans = self.training, self.plans
        # Solving a plan draws some as well.
        drawn = random_states(training.device)
        allocate_states(training.optimizer)
        surviving = Surviving(
            training.model, most=_MOST_MOVES, smaller=plans.next, tell=training.tell, cost=lambda: plans.cost
        )
        measured_bytes = None
        while measured_bytes is None:
            try:
                measured_bytes = max(exchange(self._rehearsed_bytes()))
                plan = solved_by_rank_0(partial(self._corrected, measured_bytes))
                if plan != training.config.plan:
                    measured_bytes = None
                    replan(training.model, plan)
                    plans.chosen = plans.chosen.with_plan(plan)
            except StepUndone as undone:
                plan = surviving.shrink(undone)
            follow_plan(training, plan=plan)
        restore_random_states(drawn, device=training.device)
        plans.chosen = plans.chosen.measured(measured_bytes)
        if plans.place.rank == 0:
            plans.note()
        return plans.chosen

    def _rehearsed_bytes(self) -> int:
        """This rank's peak in the passes of the next step, which are undone; StepUndone, if a rank had too little."""
        training = self.training
        guard = StepGuard(training.model)
        self._release()
        passes = next_passes(training)
        for _ in range(_REHEARSALS):
            with step_peak(training.model, training.optimizer, device=training.device) as peak:
                guard.begin()
                run_passes(training, passes.weights, passes.batches, guard=guard)
            guard.agree()
            guard.drop()
        self._release()
        return peak.num_bytes - guard.copied_bytes

    def _release(self) -> None:
        """What the allocator holds for nothing is not for the next plan, nor for the pool of captured steps."""
        if self.training.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.training.device)

    def _corrected(self, measured: int) -> Plan:
        """On rank 0: the plan for what was measured; the one that is there, if it is as predicted."""
        training, plans = self.training, self.plans
        plan, predicted = training.config.plan, plans.chosen.predicted_bytes
        assert predicted is not None
        found = f"Rehearsed: {bytes_text(measured)} per rank at the peak, {bytes_text(predicted)} predicted"
        if measured <= predicted * (1 + engine_model_of(plan).error_band):
            training.tell(found)
            return plan
        found = f"{found} ({measured / predicted:.2f} ×)"
        trait = require_engine(training.model).fixed_by(training.model, plan)
        if trait:
            training.tell(f"{found}: the plan stays, since it cannot change under a model with {trait}")
            return plan
        # Less is free than the budget says, and the solver could come back to what ran out.
        ran_out = plans.chosen.ran_out
        if self.num_solved == _MOST_MOVES or ran_out:
            why = "a larger plan ran out of memory" if ran_out else f"it was solved again {_MOST_MOVES} times"
            training.tell(f"{found}: {why}, so this plan stays")
            return plan
        self.num_solved += 1
        self.ratio = max(self.ratio, measured / predicted)
        budget = int(self.budget_bytes / self.ratio)
        try:
            solved = solve_again(plans.chosen, place=plans.place, budget_bytes=budget)
        except NoPlanFits as error:
            if measured > self.budget_bytes:
                raise NoPlanFits(f"{found}; {error}") from error
            training.tell(f"{found}: no plan is predicted to need less, so this one stays")
            return plan
        if solved.config.plan == plan:
            training.tell(f"{found}: it is still the best plan for a budget of {bytes_text(budget)}")
            return plan
        training.tell(f"{found}: solved again for a budget of {bytes_text(budget)}: {solved.sentence}")
        plans.chosen = solved
        return solved.config.plan
