"""A rehearsal before training: if a step needs more memory than was predicted, the `auto` plan is solved again.

The passes of the first step run on their own samples and are undone; then the samples are read again. So training is
bit for bit the same as without a rehearsal. There is no update, because undoing it would need a second copy of
parameters and states; the states are allocated, though.

The largest peak of all ranks is compared with the prediction. Beyond the planner's error band the budget is divided by
their ratio, rank 0 solves again, and the model moves to the new plan, which is rehearsed too. A rank that runs out of
memory in a rehearsal ends the start, as in training (ran_out.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from shardwise.base.vocabulary.quantities import bytes_text
from shardwise.comm.groups.agreement import exchange
from shardwise.engine.random_states import random_states, restore_random_states
from shardwise.engines import replan, require_engine
from shardwise.hardware.cluster import capacity_bytes, with_budget
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS
from shardwise.planner.engine_model import engine_model_of
from shardwise.planner.search.request import NoPlanFits
from shardwise.training import run_folder
from shardwise.training.fitting.auto_plan import ChosenPlan
from shardwise.training.fitting.automatic import solved_by_rank_0
from shardwise.training.fitting.step_peak import step_peak
from shardwise.training.launch.failure import during
from shardwise.training.loop.restored import restoring
from shardwise.training.loop.training_state import Training
from shardwise.training.loop.training_step import run_passes
from shardwise.training.loop.update import forwards, next_passes
from shardwise.training.setup import open_batches

# Limits the plans that are solved again.
_MAX_MOVES = 3
# The first one learns the order of units, and prefetches nothing yet.
_REHEARSALS = 2


def probe_memory(training: Training, *, chosen: ChosenPlan) -> None:
    """Rehearse a step of an `auto` plan, and move the training to a plan that needs less, if need be. Collective."""
    is_auto, is_over = chosen.given.plan.is_auto, training.step >= training.num_steps
    plan, can_undo = require_engine(training.model).plan, not training.config.plan.updates_in_backward
    if not is_auto or is_over or not can_undo or LIMITS[plan.engine].why_not_call("replan", plan) is not None:
        return
    # Only rank 0 knows the prediction, and whether an earlier start has measured the plan.
    budget = exchange(_budget_to_probe(chosen))[0]
    if budget is None:
        return
    training.tell("Trying a step, to measure its memory …")
    with during("a trial of the first step"):
        _Probe(training=training, chosen=chosen, budget_bytes=budget).run()


def _budget_to_probe(chosen: ChosenPlan) -> int | None:
    """Return the memory budget on rank 0, if a plan was solved for it and not measured yet; else None."""
    is_predicted, is_measured = (chosen.recorded(name) is not None for name in ("predicted_bytes", "measured_bytes"))
    if not chosen.given.auto.probe or not is_predicted or is_measured:
        return None
    return capacity_bytes(with_budget(chosen.cluster, budget_bytes=chosen.given.auto.budget_bytes))


@dataclass(slots=True, kw_only=True)
class _Probe:
    """`ratio`: the largest one so far of measured to predicted memory; `num_solved`: plans solved again. On rank 0."""

    training: Training
    chosen: ChosenPlan
    budget_bytes: int
    ratio: float = 1.0
    num_solved: int = 0

    def run(self) -> None:
        training = self.training
        # Rehearsing and solving draw random numbers.
        drawn = random_states(training.device)
        measured_bytes = None
        while measured_bytes is None:
            measured_bytes = max(exchange(self._rehearse()))
            plan = solved_by_rank_0(partial(self._correct, measured_bytes))
            if plan != training.config.plan:
                measured_bytes = None
                replan(training.model, plan)
                self.chosen = self.chosen.with_plan(plan)
                # Before its rehearsal, which may run out of memory.
                self._save()
            _follow_plan(training, plan=plan)
        restore_random_states(drawn, device=training.device)
        self.chosen = self.chosen.measured(measured_bytes)
        self._save()

    def _save(self) -> None:
        if self.chosen.place.rank == 0:
            run_folder.save_plan(self.chosen.config)
            self.chosen.save()

    def _rehearse(self) -> int:
        """Run and undo the passes of the next step; return this rank's peak bytes."""
        training, model = self.training, self.training.model
        require_engine(model).allocate_states(training.optimizer)
        self._empty_cache()
        step = next_passes(training)
        passes = forwards(training, step.weights, step.batches)
        for _ in range(_REHEARSALS):
            with step_peak(model, training.optimizer, device=training.device) as peak, _undone(training):
                run_passes(model, passes, scaler=training.scaler)
        self._empty_cache()
        # A rehearsal copies the buffers.
        return peak.num_bytes - sum(buffer.nbytes for buffer in model.buffers())

    def _empty_cache(self) -> None:
        """Free the allocator's unused blocks, for the next plan and for the pool of CUDA graphs."""
        if self.training.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.training.device)

    def _correct(self, measured: int) -> Plan:
        """Return the plan for the measured memory, on rank 0; the current one, if it is as predicted."""
        training = self.training
        plan, predicted = training.config.plan, self.chosen.recorded("predicted_bytes")
        found = f"Tried: {bytes_text(measured)} per rank at the peak, {bytes_text(predicted)} predicted"
        if measured <= predicted * (1 + engine_model_of(plan).error_band):
            training.tell(found)
            return plan
        found = f"{found} ({measured / predicted:.2f} ×)"
        if why := self._why_fixed(plan):
            training.tell(f"{found}: {why}")
            return plan
        self.num_solved += 1
        self.ratio = max(self.ratio, measured / predicted)
        budget = int(self.budget_bytes / self.ratio)
        try:
            solved = self.chosen.solved(budget_bytes=budget)
        except NoPlanFits as error:
            if measured > self.budget_bytes:
                raise NoPlanFits(f"{found}; {error}") from error
            training.tell(f"{found}: no plan is predicted to need less, so this one stays")
            return plan
        if solved.config.plan == plan:
            training.tell(f"{found}: it is still the best plan for a budget of {bytes_text(budget)}")
            return plan
        training.tell(f"{found}: solved again for a budget of {bytes_text(budget)}: {solved.recorded('said')}")
        self.chosen = solved
        return solved.config.plan

    def _why_fixed(self, plan: Plan) -> str:
        """Return the reason why the plan is not solved again; "" if it is."""
        if trait := require_engine(self.training.model).fixed_by(plan):
            return f"the plan stays, since it cannot change under a model with {trait}"
        # Less memory is free than the budget says: the solver could return the plan that ran out.
        if self.chosen.recorded("ran_out"):
            return "a larger plan ran out of memory, so this plan stays"
        return f"it was solved again {_MAX_MOVES} times, so this plan stays" if self.num_solved == _MAX_MOVES else ""


@contextmanager
def _undone(training: Training) -> Iterator[None]:
    """Undo the passes in this block, which no update follows: random numbers, buffers and gradients are as before."""
    with restoring(training.model, device=training.device):
        yield
        training.optimizer.zero_grad()


def _follow_plan(training: Training, *, plan: Plan) -> None:
    """Split steps into passes as the plan says, and read the samples of the current step again."""
    assert plan.micro_batch is not None
    training.config = replace(training.config, plan=plan)
    training.sharing = replace(training.sharing, micro_batch=plan.micro_batch, accumulate=plan.accumulate)
    open_batches(training)
