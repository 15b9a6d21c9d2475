"""`solve_plan`: finds the plan for `strategy = "auto"`: a model, a cluster and a memory budget → one plan."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from shardwise.hardware.cluster import with_budget
from shardwise.plan import Plan
from shardwise.plan.limits import strategies_of
from shardwise.plan.patterns import Patterns
from shardwise.plan.placement import AUTO, STRATEGIES
from shardwise.planner.search.candidates import Candidate, SpecFor, candidates, cost
from shardwise.planner.search.compile_choice import compiling_pays, tried_first
from shardwise.planner.search.dial import Dial, turned_units
from shardwise.planner.search.dial_cost import DialCosts
from shardwise.planner.search.request import (
    HOST_ROW,
    AutoRequest,
    NoPlanFits,
    batches_of,
    limit_bytes,
    may_recompute,
    may_update_in_backward,
    may_use_host,
    options_of,
    uses_host,
    with_settings,
)
from shardwise.planner.search.reserved_search import WORTH_A_LOOK, best_reserved
from shardwise.planner.search.solver import Solver
from shardwise.planner.search.tiles import tiles_of
from shardwise.planner.search.uniform import first_fit, first_fit_offloaded, nothing_fits
from shardwise.planner.time.step_time import why_not_timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The plan and its cost, on a cluster whose devices are limited to the budget. `num_replays`: replayed plans."""

    candidate: Candidate
    num_replays: int


def solve_plan(spec_for: SpecFor, *, request: AutoRequest, fixed: Sequence[Candidate] | None = None) -> Solved:
    """Return the best plan that fits the budget with the planner's error band; raises NoPlanFits if there is none.

    It is never behind one of `fixed`, the plans with one choice for all units (default: they are computed here): the
    solver looks at fewer batches of each than they do.
    """
    try:
        found = _solved(spec_for, request=request)
    except NoPlanFits:
        best = _best_fixed(spec_for, request=request, fixed=fixed, merit=-inf)
        if best is None:
            raise
        return Solved(candidate=best, num_replays=0)
    best = _best_fixed(spec_for, request=request, fixed=fixed, merit=_merit(found.candidate, goal=request.goal))
    return replace(found, candidate=best) if best is not None else found


def _best_fixed(
    spec_for: SpecFor, *, request: AutoRequest, fixed: Sequence[Candidate] | None, merit: float
) -> Candidate | None:
    """Return the best plan with one choice for all units, if it fits and is better than this merit."""

    def better(found: Sequence[Candidate]) -> list[Candidate]:
        return [one for one in found if one.fits == "yes" and one.time and _merit(one, goal=request.goal) > merit]

    if fixed is None:
        # The allocator's model takes most of the time, and lets no plan fit that does not fit without it.
        fixed = better(_fixed(spec_for, request=request, quick=True))
        if not request.quick:
            fixed = _fixed(spec_for, request=request, rows=list(dict.fromkeys(one.plan.strategy for one in fixed)))
    found = max(better(fixed), key=lambda one: _merit(one, goal=request.goal), default=None)
    return replace(found, label=AUTO) if found is not None else None


def _fixed(
    spec_for: SpecFor, *, request: AutoRequest, rows: Sequence[str] | None = None, quick: bool = False
) -> list[Candidate]:
    """Return plans with one choice for all units, each at its best micro-batch and recompute mode."""
    plan, rows = request.plan, rows if rows is not None else request.rows or strategies_of(request.plan.engine)
    update = "step" if plan.update == AUTO else plan.update
    compiled = "none" if plan.compile == AUTO else plan.compile
    return candidates(
        spec_for,
        plan=_given(replace(request, plan=replace(plan, update=update, compile=compiled))),
        strategies=[row for row in rows if not plan.offload_states or STRATEGIES[row].grads.is_sharded],
        cluster=with_budget(request.cluster, budget_bytes=request.budget_bytes),
        optimizer=request.optimizer,
        goal=request.goal,
        quick=quick,
        global_batch=request.global_batch,
        recomputes=request.recomputes,
    )


def _solved(spec_for: SpecFor, *, request: AutoRequest) -> Solved:
    """Solve.

    If time cannot be predicted, return the simplest plan that fits, with the same choice for every unit. Host memory is
    tried where nothing fits without it; where the cluster states it, also instead of recomputation. For long sequences,
    tiles are tried where nothing fits, instead of host memory, and instead of recomputing whole units. With
    `update = "auto"`, updates inside backward are tried where memory is short.
    """
    if request.plan.update == AUTO:
        by_step = with_settings(request, update="step")
        in_backward = with_settings(request, update="backward") if may_update_in_backward(request) else None
        return _or_better(lambda: _solved(spec_for, request=by_step), spec_for=spec_for, other=in_backward)
    costs = costs_of(spec_for, request=request)
    tiles = tiles_of(costs.spec, plan=request.plan)
    tiled = with_settings(request, tile=tiles) if tiles else None
    return _or_better(lambda: solve_for(costs, request=request), spec_for=spec_for, other=tiled)


def _or_better(solve: Callable[[], Solved], *, spec_for: SpecFor, other: AutoRequest | None) -> Solved:
    """Return what `solve` finds; where that leaves memory short, the other request's answer if it is better."""
    try:
        found = solve()
    except NoPlanFits:
        if other is None:
            raise
        return _solved(spec_for, request=other)
    if other is not None and (uses_host(found.candidate.plan) or _recomputes_units(found.candidate.plan)):
        with suppress(NoPlanFits):
            return max(found, _solved(spec_for, request=other), key=lambda one: _merit(one.candidate, goal=other.goal))
    return found


def _merit(found: Candidate, *, goal: str) -> float:
    return found.samples_per_s if goal == "throughput" else -found.memory.device_bytes


def _recomputes_units(plan: Plan) -> bool:
    """Return whether whole units are recomputed: tiles compute less again."""
    return "full" in (plan.recompute, *plan.recompute_overrides.values())


def costs_of(spec_for: SpecFor, *, request: AutoRequest) -> DialCosts:
    """Return the costs of dials, which serve any budget."""
    plan = _given(request)
    recomputes = request.recomputes if may_recompute(plan) else ("none",)
    spec = spec_for(*(replace(plan, recompute=recompute) for recompute in recomputes))
    if request.plan.compile == AUTO and not turned_units(spec):
        plan = replace(plan, compile="none")
    return DialCosts(spec=spec, base=plan, cluster=request.cluster, optimizer=request.optimizer)


def _given(request: AutoRequest) -> Plan:
    """Return the plan without the settings that are chosen per unit."""
    return replace(
        request.plan,
        strategy="fsdp",
        overrides=Patterns(),
        recompute="none",
        recompute_overrides=Patterns(),
        compile=tried_first(request.plan, cluster=request.cluster),
    )


def solve_for(costs: DialCosts, *, request: AutoRequest) -> Solved:
    """Solve like `solve_plan`, with costs that serve several budgets."""
    found = _solve_with(costs, request=request)
    is_chosen = request.plan.compile == AUTO and costs.base.compile != "none"
    if is_chosen and not compiling_pays(found.candidate, spec=costs.spec, optimizer=costs.optimizer):
        return _solve_with(costs.based_on(replace(costs.base, compile="none")), request=request)
    return found


def _solve_with(costs: DialCosts, *, request: AutoRequest) -> Solved:
    """Solve with the `compile` of the costs' base plan."""
    request = replace(request, plan=costs.base)
    is_timed = why_not_timed(costs.spec, plan=costs.base, cluster=costs.cluster) is None
    dial = _best_dial(costs, request=request) if is_timed else first_fit(costs, request=request)
    is_short = dial is None or (costs.cluster.host_bytes is not None and _recomputes(dial))
    if is_timed and is_short and may_use_host(request):
        costs, dial = _with_host_memory(costs, dial, request=request)
    if dial is None and not is_timed:
        costs, dial = first_fit_offloaded(costs, request=request)
    if dial is not None:
        return Solved(candidate=_cost(costs, dial, request=request), num_replays=costs.num_replays)
    raise NoPlanFits(nothing_fits(costs, request=request))


def _recomputes(dial: Dial) -> bool:
    return any(choice.recompute != "none" for choice in dial.choices)


def _with_host_memory(costs: DialCosts, dial: Dial | None, *, request: AutoRequest) -> tuple[DialCosts, Dial | None]:
    """Return the dial, or a faster one with units in host memory; if none fits, one that the CPU updates."""
    own = replace(request, rows=(HOST_ROW,), recomputes=tuple(way for way in request.recomputes if way != "selective"))
    hosted = _best_dial(costs, request=own, on_host=True)
    if hosted is not None and (dial is None or costs.speed(hosted) > WORTH_A_LOOK * costs.speed(dial)):
        return costs, hosted
    if dial is None and not request.plan.updates_in_backward:
        by_cpu = costs.based_on(replace(costs.base, offload_update="host"))
        return by_cpu, _best_dial(by_cpu, request=replace(own, plan=by_cpu.base), on_host=True)
    return costs, dial


def _best_dial(costs: DialCosts, *, request: AutoRequest, on_host: bool = False) -> Dial | None:
    """Return the best dial; with several passes, the better of both ways to accumulate."""
    batches = batches_of(request)
    may_reduce = not request.plan.updates_in_backward and (batches.samples is not None or batches.passes > 1)
    ways = {request.plan.accumulate_reduced, may_reduce}
    found = []
    for reduced in sorted(ways):
        solver = Solver(
            costs=costs,
            options=options_of(request, on_host=on_host),
            batches=batches,
            goal=request.goal,
            limit=limit_bytes(costs, request=request),
            accumulate_reduced=reduced,
            climbs=not on_host,
        )
        dial = best_reserved(solver, quick=request.quick)
        found += [dial] if dial is not None else []
        if dial is not None and dial.accumulate == 1:
            break
    sign = -1 if request.goal == "throughput" else 1
    return min(found, key=lambda dial: sign * solver.costs.speed(dial), default=None)


def _cost(costs: DialCosts, dial: Dial, *, request: AutoRequest) -> Candidate:
    cluster = with_budget(request.cluster, budget_bytes=request.budget_bytes)
    plan = costs.plan(dial)
    # Dials shard the most across a mesh, which takes the least memory.
    found = [
        cost(costs.spec, plan=one, cluster=cluster, optimizer=costs.optimizer, quick=request.quick)
        for one in dict.fromkeys((plan, replace(plan, across=request.plan.across)))
    ]
    fastest = max((one for one in found if one.fits == found[0].fits), key=lambda one: one.samples_per_s)
    return replace(fastest if request.goal == "throughput" else found[0], label=AUTO)
