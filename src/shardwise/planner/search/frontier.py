"""The frontier: the best speed for every memory budget, of the solver's plan and of the fixed strategies. No torch."""

from dataclasses import dataclass, replace

from shardwise.engine_limits import strategies_of
from shardwise.errors import InvalidPlan
from shardwise.planner.search.auto import AutoRequest, NoPlanFits, costs_of, solve_for, with_budget
from shardwise.planner.search.candidates import Candidate, SpecFor, candidates, capacity_bytes
from shardwise.planner.search.dial_cost import DialCosts
from shardwise.quantities import SIZE_EXAMPLE

_NUM_BUDGETS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """At one budget: the solver's plan, and the fastest that has one strategy and one recompute for all units.

    None where nothing fits; `auto` is not given either where only offloading would fit, whose time is not predicted.
    """

    budget_bytes: int
    auto: Candidate | None
    fixed: Candidate | None


def frontier(spec_for: SpecFor, *, request: AutoRequest) -> list[FrontierPoint]:
    """Points at equal distances up to the budget, or to what the device has; with tensors alone, as `--scale`."""
    capacity = capacity_bytes(with_budget(request.cluster, budget_bytes=request.budget_bytes))
    if capacity is None:
        raise InvalidPlan(
            f"--frontier: the device's capacity is not known; say it with --budget, such as {SIZE_EXAMPLE}"
        )
    costs = costs_of(spec_for, request=request)
    budgets = [capacity * number // _NUM_BUDGETS for number in range(1, _NUM_BUDGETS + 1)]
    found = []
    for budget in budgets:
        own = replace(request, budget_bytes=budget, quick=True)
        found.append(
            FrontierPoint(budget_bytes=budget, auto=_auto(costs, request=own), fixed=_fixed(spec_for, request=own))
        )
    return found


def _auto(costs: DialCosts, *, request: AutoRequest) -> Candidate | None:
    try:
        found = solve_for(costs, request=request).candidate
    except NoPlanFits:
        return None
    return found if found.time is not None else None


def _fixed(spec_for: SpecFor, *, request: AutoRequest) -> Candidate | None:
    found = [
        one
        for recompute in request.recomputes
        for one in candidates(
            spec_for,
            plan=replace(request.plan, strategy="fsdp", recompute=recompute),
            strategies=request.rows or strategies_of(request.plan.engine),
            cluster=with_budget(request.cluster, budget_bytes=request.budget_bytes),
            optimizer=request.optimizer,
            goal=request.goal,
            quick=True,
            global_batch=request.global_batch,
        )
        if one.fits == "yes" and one.time is not None
    ]
    return max(found, key=_speed, default=None)


def _speed(candidate: Candidate) -> float:
    assert candidate.time is not None
    return candidate.time.samples_per_s
