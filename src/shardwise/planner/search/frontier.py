"""The frontier: the best speed for every memory budget, by the solver and by fixed strategies. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwise.base.errors import InvalidPlan
from shardwise.base.vocabulary.quantities import SIZE_EXAMPLE
from shardwise.hardware.cluster import capacity_bytes, with_budget
from shardwise.plan.limits import strategies_of
from shardwise.planner.search.auto import costs_of, solve_for
from shardwise.planner.search.candidates import Candidate, SpecFor, candidates
from shardwise.planner.search.dial_cost import DialCosts
from shardwise.planner.search.request import AutoRequest, NoPlanFits


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One budget: the solver's plan, and the fastest plan of each strategy with one recompute mode for all units.

    `auto` is None if nothing fits, or only with offloading, whose time is not predicted.
    """

    budget_bytes: int
    auto: Candidate | None
    by_strategy: Mapping[str, Candidate]

    @property
    def fixed(self) -> Candidate | None:
        """The fastest plan with one strategy."""
        return max(self.by_strategy.values(), key=lambda one: one.samples_per_s, default=None)


def frontier(spec_for: SpecFor, *, request: AutoRequest, num_budgets: int = 8) -> list[FrontierPoint]:
    """Return points at equal distances up to the budget or the device's capacity, without the allocator's model."""
    budgets = _budgets(request, num_budgets=num_budgets)
    costs = costs_of(spec_for, request=request)
    found = []
    for budget in budgets:
        own = replace(request, budget_bytes=budget, quick=True)
        by_strategy = _by_strategy(spec_for, request=own)
        found.append(FrontierPoint(budget_bytes=budget, auto=_auto(costs, request=own), by_strategy=by_strategy))
    return found


def fixed_frontier(spec_for: SpecFor, *, request: AutoRequest, num_budgets: int = 8) -> list[FrontierPoint]:
    """Return the same points without the solver's plans, which takes a fraction of the time."""
    return [
        FrontierPoint(
            budget_bytes=budget,
            auto=None,
            by_strategy=_by_strategy(spec_for, request=replace(request, budget_bytes=budget, quick=True)),
        )
        for budget in _budgets(request, num_budgets=num_budgets)
    ]


def _budgets(request: AutoRequest, *, num_budgets: int) -> list[int]:
    capacity = capacity_bytes(with_budget(request.cluster, budget_bytes=request.budget_bytes))
    if capacity is None:
        raise InvalidPlan(
            f"--frontier: the device's capacity is not known; say it with --budget, such as {SIZE_EXAMPLE}"
        )
    return [capacity * number // num_budgets for number in range(1, num_budgets + 1)]


def _auto(costs: DialCosts, *, request: AutoRequest) -> Candidate | None:
    try:
        found = solve_for(costs, request=request).candidate
    except NoPlanFits:
        return None
    return found if found.time is not None else None


def _by_strategy(spec_for: SpecFor, *, request: AutoRequest) -> dict[str, Candidate]:
    found = [
        one
        for one in candidates(
            spec_for,
            plan=replace(request.plan, strategy="fsdp"),
            strategies=request.rows or strategies_of(request.plan.engine),
            cluster=with_budget(request.cluster, budget_bytes=request.budget_bytes),
            optimizer=request.optimizer,
            goal=request.goal,
            quick=True,
            global_batch=request.global_batch,
            recomputes=request.recomputes,
        )
        if one.fits == "yes" and one.time is not None
    ]
    # The fastest of each strategy comes last and replaces the others.
    return {one.plan.strategy: one for one in sorted(found, key=lambda one: one.samples_per_s)}
