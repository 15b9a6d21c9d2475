"""Computes the answer of `shardwise plan`: candidates, the solver's plan, the recommendation, and what options add."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.base.errors import InvalidPlan
from shardwise.base.vocabulary.span import Span
from shardwise.doors.cli.plan_options import PlanOptions, strategies_for_engine, strategy_names
from shardwise.hardware.cluster import with_budget
from shardwise.measure.report.text.verdict import no_fit, reasons
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.plan.placement import AUTO, STRATEGIES
from shardwise.planner.search.candidates import Candidate, SpecFor, candidates, cost
from shardwise.planner.search.recommend import Reason, Recommendation, recommend
from shardwise.planner.search.request import AutoRequest, NoPlanFits
from shardwise.planner.systems import OWN, System
from shardwise.planner.time.band import needed_bytes_per_s
from shardwise.planner.time.step_time import job_on, timeline

if TYPE_CHECKING:
    from shardwise.planner.search.frontier import FrontierPoint
    from shardwise.planner.search.scale import Scaled
    from shardwise.planner.search.training_cost import TrainingCost

_CLEARLY_FASTER = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion(AutoRequest):
    """The options of the command: the solver's request, and what else is to be shown.

    options       as they were given; `ask` makes the question of other ones, and `find_ways` looks for some that fit
    spec_for      of the model; a caller may watch what is asked for
    system        the system that is predicted, if it is another one; `like`: what it has set, as a sentence
    strategy      a strategy, all of them, or auto: all of them and the solver's plan
    num_tokens, price_per_gpu_hour    of a complete training run, whose cost is then shown
    row_recomputes    the recompute modes that a strategy may have, which takes the best; none: that of the plan
    quick         without the allocator's model, the solver, and what is said about other plans
    """

    options: PlanOptions
    ask: "Callable[[PlanOptions], PlanQuestion]"
    find_ways: "Callable[[PlanQuestion], list[WayOut]]"
    model: Model
    spec_for: SpecFor
    strategy: str
    system: System = OWN
    like: str = ""
    num_tokens: float | None = None
    price_per_gpu_hour: float | None = None
    row_recomputes: tuple[str, ...] = ()
    scales: bool = False
    has_frontier: bool = False
    has_timeline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """Options whose own answer fits: `candidate` is its recommended row. `change`: what differs, in a few words."""

    change: str
    options: PlanOptions
    candidate: Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """The answer.

    found           the rows of the table; `recommendation.index` is one of them
    ways            where nothing fits: changes with which something does
    fits            whether any of them fits
    needed_bytes_per_s    bandwidth of a node below which communication bounds the recommended plan; None for one node
    captured   the recommended plan with units as CUDA graphs, as a run has them by default; None unless that is clearly
               faster
    compiled   the solver's plan with compiled units; None unless they were left out and are clearly faster
    """

    question: PlanQuestion
    found: list[Candidate]
    recommendation: Recommendation
    why: str
    ways: list[WayOut]
    fits: bool
    needed_bytes_per_s: float | None
    captured: Candidate | None
    compiled: Candidate | None
    scaling: "list[Scaled] | None"
    frontier: "list[FrontierPoint] | None"
    training: "list[TrainingCost] | None"
    spans: list[Span] | None

    def save(self, path: Path) -> None:
        if self.recommendation.best is None:
            raise InvalidPlan(f"--save {path}: {self.why}")
        self.saved(self.recommendation.best).save(path)

    def saved(self, one: Candidate) -> Plan:
        """Return the plan for a file: with a mesh only if one was asked for, or it has two axes."""
        return one.plan if self.question.plan.mesh is not None else one.plan.for_any_ranks


def answer(question: PlanQuestion) -> PlanAnswer:
    spec_for, optimizer = question.spec_for, question.optimizer
    found = fixed_candidates(question, quick=question.quick)
    solves = AUTO in strategy_names(question.strategy, mesh=question.plan.mesh) and not question.quick
    if solves:
        found, chosen, why = _with_auto(question, found)
    else:
        chosen = recommend(found, goal=question.goal, spec_for=spec_for, optimizer=optimizer, quick=question.quick)
        why = reasons(chosen)
    ways: list[WayOut] = []
    if chosen.reason is Reason.NOTHING_FITS and not question.quick:
        ways = question.find_ways(question)
        # The solver has said why it has no plan.
        why = why if solves else no_fit(found, has_ways=bool(ways))
    return PlanAnswer(
        question=question,
        found=found,
        recommendation=chosen,
        why=why,
        ways=ways,
        fits=chosen.reason is not Reason.NOTHING_FITS,
        needed_bytes_per_s=_needed(question, chosen.best),
        captured=_captured(question, chosen.best),
        compiled=_compiled(question, chosen.best),
        scaling=_scaling(question, found=found),
        frontier=_frontier(question),
        training=_training(question, found),
        spans=_spans(question, chosen.best),
    )


def fixed_candidates(question: PlanQuestion, *, quick: bool) -> list[Candidate]:
    """Return the rows of the table without the solver's."""
    return candidates(
        question.spec_for,
        plan=question.plan,
        strategies=_strategies(question),
        cluster=with_budget(question.cluster, budget_bytes=question.budget_bytes),
        optimizer=question.optimizer,
        goal=question.goal,
        system=question.system,
        global_batch=question.global_batch,
        quick=quick,
        recomputes=question.row_recomputes,
    )


def _strategies(question: PlanQuestion) -> list[str]:
    """Return the strategies of the table; only those that shard gradients can keep states in host memory."""
    plan = question.plan
    found = strategies_for_engine(question.strategy, engine=plan.engine, mesh=plan.mesh)
    sharded = [name for name in found if STRATEGIES[name].grads.is_sharded]
    if plan.offload_states and not sharded:
        raise InvalidPlan(
            f"--offload states with --strategy {question.strategy}: what every rank holds whole stays on the device; "
            "take zero2, shard_grad_op or fsdp"
        )
    return sharded if plan.offload_states else found


def _with_auto(question: PlanQuestion, found: list[Candidate]) -> tuple[list[Candidate], Recommendation, str]:
    """Add the solver's plan as a row, and recommend it."""
    from shardwise.planner.search.auto import solve_plan
    from shardwise.planner.search.chosen_text import chosen_text

    try:
        solved = solve_plan(question.spec_for, request=question, fixed=found)
    except NoPlanFits as error:
        return found, Recommendation(index=None, reason=Reason.NOTHING_FITS), str(error)
    best = solved.candidate
    names = [unit.name for unit in question.spec_for(best.plan).units]
    why = f"{chosen_text(best.plan, names=names)} ({solved.num_replays} plans were replayed)"
    reason = Reason.SMALLEST_PEAK if question.goal == "memory" else Reason.FASTEST
    return [*found, best], Recommendation(index=len(found), reason=reason, best=best), why


def _captured(question: PlanQuestion, best: Candidate | None) -> Candidate | None:
    """Return the cost of the recommended plan with units as CUDA graphs, if that is clearly faster.

    Only the run decides which units are graphs, so the table shows ordinary ones.
    """
    if question.quick or best is None or best.time is None or best.cluster.device.name == "cpu":
        return None
    if question.system.name or not best.plan.captures:
        return None
    return _clearly_faster(question, best.plan, than=best, as_graphs=True)


def _compiled(question: PlanQuestion, best: Candidate | None) -> Candidate | None:
    """Return the solver's plan with compiled units, if that is clearly faster.

    The solver compiles only on request, because compiled units round differently. Plans with tiles get no such hint:
    tracing compiled tiles takes longer than the whole search, and most of such a step is attention, which compiling
    does not change.
    """
    if (
        question.quick
        or best is None
        or best.label != AUTO
        or question.plan.compile != "none"
        or best.cluster.device.name == "cpu"
    ):
        return None
    if best.plan.tile:
        return None
    return _clearly_faster(question, replace(best.plan, compile="inductor"), than=best)


def _clearly_faster(
    question: PlanQuestion, plan: Plan, *, than: Candidate, as_graphs: bool = False
) -> Candidate | None:
    """Return the cost of the plan; None unless its steps are clearly shorter."""
    spec = question.spec_for(plan)
    # The allocator's model takes most of the time, and does not change that of a step.
    costs = partial(cost, spec, plan=plan, cluster=than.cluster, optimizer=question.optimizer, as_graphs=as_graphs)
    quick = costs(quick=True)
    if quick.time is None or than.time is None or quick.time.step_seconds >= _CLEARLY_FASTER * than.time.step_seconds:
        return None
    return costs()


def _needed(question: PlanQuestion, best: Candidate | None) -> float | None:
    if question.quick or best is None or best.time is None or best.cluster.num_nodes == 1:
        return None
    spec, cluster = question.spec_for(best.plan), best.cluster
    job = job_on(spec, plan=best.plan, cluster=cluster, optimizer=question.optimizer)
    return needed_bytes_per_s(job, batch=best.batch, cluster=cluster, system=question.system)


def _scaling(question: PlanQuestion, *, found: list[Candidate]) -> "list[Scaled] | None":
    if not question.scales:
        return None
    from shardwise.planner.search.scale import scaling

    fixed = [one for one in found if not one.label]
    return scaling(
        question.spec_for,
        plan=question.plan,
        found=fixed,
        cluster=with_budget(question.cluster, budget_bytes=question.budget_bytes),
        optimizer=question.optimizer,
        recomputes=question.row_recomputes,
    )


def _frontier(question: PlanQuestion) -> "list[FrontierPoint] | None":
    if not question.has_frontier:
        return None
    from shardwise.planner.search.frontier import frontier

    return frontier(question.spec_for, request=question)


def _training(question: PlanQuestion, found: list[Candidate]) -> "list[TrainingCost] | None":
    """Return the cost of the training run under each plan that fits."""
    if question.num_tokens is None:
        if question.price_per_gpu_hour is not None:
            raise InvalidPlan("--price needs --tokens: how long the training is")
        return None
    from shardwise.planner.search.training_cost import training_cost

    rows = [
        training_cost(one, num_tokens=question.num_tokens, price_per_gpu_hour=question.price_per_gpu_hour)
        for one in found
        if one.fits in ("yes", "tight")
    ]
    return [row for row in rows if row is not None]


def _spans(question: PlanQuestion, best: Candidate | None) -> list[Span] | None:
    """Return the timeline of the recommended plan's step, if it was requested and is known."""
    if not question.has_timeline or best is None or best.time is None:
        return None
    spec = question.spec_for(best.plan)
    return timeline(spec, plan=best.plan, cluster=best.cluster, optimizer=question.optimizer)
