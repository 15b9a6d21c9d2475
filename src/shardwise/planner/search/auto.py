"""`solve_plan`: finds the plan for `strategy = "auto"`: a model, a cluster and a memory budget → one plan."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.hardware import Cluster
from shardwise.hardware.sourced import Sourced
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS, strategies_of
from shardwise.plan.mesh import Mesh
from shardwise.plan.patterns import Patterns
from shardwise.plan.placement import AUTO, SHARDED, STRATEGIES
from shardwise.planner.memory.states import needs_whole_matrices
from shardwise.planner.search.candidates import Candidate, SpecFor, capacity_bytes, cost, meshes
from shardwise.planner.search.compile_choice import compiling_pays, tried_first
from shardwise.planner.search.dial import ACTIVATIONS, STATES, Choice, Dial, turned_units
from shardwise.planner.search.dial_cost import DialCosts
from shardwise.planner.search.micro_batches import MicroBatches, micro_batches_of
from shardwise.planner.search.reserved_search import WORTH_A_LOOK, best_reserved
from shardwise.planner.search.solver import Solver
from shardwise.planner.search.tiles import tiles_of
from shardwise.planner.time.step_time import why_not_timed
from shardwise.vocabulary.quantities import bytes_text

RECOMPUTES = ("none", "selective", "full")
# The row whose units may be in host memory, and what of them may.
_HOST_ROW = "fsdp"
_PLACES = (frozenset[str](), frozenset({STATES}), frozenset({ACTIVATIONS}), frozenset({STATES, ACTIVATIONS}))


class NoPlanFits(ShardwiseError):  # noqa: N818
    """Nothing that the solver can set fits the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoRequest:
    """A request for a plan. Host memory that the cluster states may also replace recomputation.

    plan          the fixed settings: precision, engine, mesh and micro-batch if set, and so on. The solver chooses the
                  strategy, recompute, their overrides, and compile and update if they are auto
    budget_bytes  memory to use per device (default: all)
    global_batch  samples per step over all ranks (default: plan.accumulate passes)
    rows          strategies that units may have (default: all that the engine can run)
    quick         skip the allocator's model
    """

    plan: Plan
    cluster: Cluster
    optimizer: str = "adamw"
    budget_bytes: int | None = None
    global_batch: int | None = None
    goal: str = "throughput"
    rows: tuple[str, ...] = ()
    recomputes: tuple[str, ...] = RECOMPUTES
    quick: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """The plan and its cost, on a cluster whose devices are limited to the budget. `num_replays`: replayed plans."""

    candidate: Candidate
    num_replays: int


def solve_plan(spec_for: SpecFor, *, request: AutoRequest) -> Solved:
    """Return the best plan that fits the budget with the planner's error band; raises NoPlanFits if there is none.

    If time cannot be predicted, return the simplest plan that fits, with the same choice for every unit. Host memory is
    tried where nothing fits without it; where the cluster states it, also instead of recomputation. For long sequences,
    tiles are tried where nothing fits, instead of host memory, and instead of recomputing whole units. With
    `update = "auto"`, updates inside backward are tried where memory is short.
    """
    if request.plan.update == AUTO:
        by_step = _with(request, update="step")
        in_backward = _with(request, update="backward") if _may_update_in_backward(request) else None
        return _or_faster(lambda: solve_plan(spec_for, request=by_step), spec_for=spec_for, other=in_backward)
    costs = costs_of(spec_for, request=request)
    tiles = tiles_of(costs.spec, plan=request.plan)
    tiled = _with(request, tile=tiles) if tiles else None
    return _or_faster(lambda: solve_for(costs, request=request), spec_for=spec_for, other=tiled)


def _or_faster(solve: Callable[[], Solved], *, spec_for: SpecFor, other: AutoRequest | None) -> Solved:
    """Return what `solve` finds; where that leaves memory short, the other request's answer if it is faster."""
    try:
        found = solve()
    except NoPlanFits:
        if other is None:
            raise
        return solve_plan(spec_for, request=other)
    if other is not None and (_uses_host(found.candidate.plan) or _recomputes_units(found.candidate.plan)):
        with suppress(NoPlanFits):
            second = solve_plan(spec_for, request=other)
            if second.candidate.samples_per_s > WORTH_A_LOOK * found.candidate.samples_per_s:
                return second
    return found


def _with(request: AutoRequest, **settings: Any) -> AutoRequest:
    return replace(request, plan=replace(request.plan, **settings))


def _may_update_in_backward(request: AutoRequest) -> bool:
    plan = request.plan
    return (
        LIMITS[plan.engine].has("update")
        and not plan.backward_hindrance
        and not needs_whole_matrices(request.optimizer)
    )


def _uses_host(plan: Plan) -> bool:
    return bool(plan.offload_states or plan.offload_activations)


def _recomputes_units(plan: Plan) -> bool:
    """Return whether whole units are recomputed: tiles compute less again."""
    return "full" in (plan.recompute, *plan.recompute_overrides.values())


def costs_of(spec_for: SpecFor, *, request: AutoRequest) -> DialCosts:
    """Return the costs of dials, which serve any budget."""
    plan = _given(request)
    for recompute in request.recomputes if _may_recompute(plan) else ("none",):
        spec = spec_for(replace(plan, recompute=recompute))
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
        return _solve_with(_based_on(costs, replace(costs.base, compile="none")), request=request)
    return found


def _solve_with(costs: DialCosts, *, request: AutoRequest) -> Solved:
    """Solve with the `compile` of the costs' base plan."""
    request = replace(request, plan=costs.base)
    is_timed = why_not_timed(costs.spec, plan=costs.base, cluster=costs.cluster) is None
    dial = _best_dial(costs, request=request) if is_timed else _first_fit(costs, request=request)
    is_short = dial is None or (costs.cluster.host_bytes is not None and _recomputes(dial))
    if is_timed and is_short and _may_use_host(request):
        costs, dial = _with_host_memory(costs, dial, request=request)
    if dial is not None:
        return Solved(candidate=_cost(costs, dial, request=request), num_replays=costs.num_replays)
    offloaded = None if is_timed else _offloaded(costs, request=request)
    if offloaded is not None:
        return offloaded
    raise NoPlanFits(_nothing_fits(costs, request=request))


def _recomputes(dial: Dial) -> bool:
    return any(choice.recompute != "none" for choice in dial.choices)


def _may_use_host(request: AutoRequest) -> bool:
    """Return whether units may be given host memory: the engine can, the link is known, the plan has not decided."""
    plan, device = request.plan, request.cluster.device
    is_free = not _uses_host(plan) and request.cluster.host_bytes != 0
    hindered = plan.captures or plan.owned or needs_whole_matrices(request.optimizer)
    rows = request.rows or strategies_of(plan.engine)
    can = LIMITS[plan.engine].has("offload_states") and device.host_link is not None and _HOST_ROW in rows
    return is_free and can and not hindered and device.torch_type != "cpu" and request.goal == "throughput"


def _with_host_memory(costs: DialCosts, dial: Dial | None, *, request: AutoRequest) -> tuple[DialCosts, Dial | None]:
    """Return the dial, or a faster one with units in host memory; if none fits, one that the CPU updates."""
    own = replace(request, rows=(_HOST_ROW,), recomputes=tuple(way for way in request.recomputes if way != "selective"))
    hosted = _best_dial(costs, request=own, on_host=True)
    if hosted is not None and (dial is None or costs.speed(hosted) > WORTH_A_LOOK * costs.speed(dial)):
        return costs, hosted
    if dial is None and not request.plan.updates_in_backward:
        by_cpu = _based_on(costs, replace(costs.base, offload_update="host"))
        return by_cpu, _best_dial(by_cpu, request=replace(own, plan=by_cpu.base), on_host=True)
    return costs, dial


def _based_on(costs: DialCosts, base: Plan) -> DialCosts:
    return DialCosts(spec=costs.spec, base=base, cluster=costs.cluster, optimizer=costs.optimizer)


def with_budget(cluster: Cluster, *, budget_bytes: int | None) -> Cluster:
    """Return the cluster with its devices limited to the budget."""
    capacity = capacity_bytes(cluster)
    if budget_bytes is None or (capacity is not None and capacity <= budget_bytes):
        return cluster
    budget = Sourced(value=budget_bytes, kind="datasheet", source="the budget that was asked for")
    return replace(cluster, device=replace(cluster.device, capacity_bytes=budget))


def _best_dial(costs: DialCosts, *, request: AutoRequest, on_host: bool = False) -> Dial | None:
    """Return the best dial; with several passes, the better of both ways to accumulate."""
    batches = _batches(request)
    ways = {request.plan.accumulate_reduced, batches.samples is not None or batches.passes > 1}
    found = []
    for reduced in sorted(ways):
        solver = Solver(
            costs=costs,
            options=_options(request, on_host=on_host),
            batches=batches,
            goal=request.goal,
            limit=_limit(costs, request=request),
            accumulate_reduced=reduced,
            climbs=not on_host,
        )
        dial = best_reserved(solver, quick=request.quick)
        found += [dial] if dial is not None else []
        if dial is not None and dial.accumulate == 1:
            break
    sign = -1 if request.goal == "throughput" else 1
    return min(found, key=lambda dial: sign * solver.costs.speed(dial), default=None)


def _limit(costs: DialCosts, *, request: AutoRequest) -> float:
    """Return the bytes that a plan may need to fit with its error band."""
    capacity = capacity_bytes(with_budget(request.cluster, budget_bytes=request.budget_bytes))
    return inf if capacity is None else capacity / (1 + costs.band)


def _options(request: AutoRequest, *, on_host: bool = False) -> dict[Mesh, list[Choice]]:
    """Return the choices of a unit on each mesh; rows that shard nothing are only tried on one."""
    found: dict[Mesh, list[Choice]] = {}
    ways = request.recomputes if _may_recompute(request.plan) else ("none",)
    places = _PLACES if on_host else _PLACES[:1]
    for row in request.rows or strategies_of(request.plan.engine):
        for mesh in meshes(row, plan=request.plan, cluster=request.cluster):
            found.setdefault(mesh, []).extend(Choice(row, way, place) for way in ways for place in places)
    return found


def _may_recompute(plan: Plan) -> bool:
    return LIMITS[plan.engine].why_not(replace(plan, recompute="full")) is None


def _batches(request: AutoRequest) -> MicroBatches:
    """Return the micro-batches that a request allows; only 1 if the capacity is unknown."""
    found = micro_batches_of(request.plan, global_batch=request.global_batch, num_ranks=request.cluster.num_ranks)
    is_bounded = request.budget_bytes is not None or capacity_bytes(request.cluster) is not None
    return found if is_bounded or not found.is_free else replace(found, micro_batch=1)


def _cost(costs: DialCosts, dial: Dial, *, request: AutoRequest) -> Candidate:
    cluster = with_budget(request.cluster, budget_bytes=request.budget_bytes)
    found = cost(costs.spec, plan=costs.plan(dial), cluster=cluster, optimizer=costs.optimizer, quick=request.quick)
    return replace(found, label=AUTO)


# If time is not predicted, or nothing fits


def _first_fit(costs: DialCosts, *, request: AutoRequest) -> Dial | None:
    """Return the simplest uniform dial that fits: first without recomputation, and with the least sharding."""
    found = sorted(_uniform_dials(costs, request=request), key=_simplicity)
    if request.goal == "memory":
        found.sort(key=costs.tensor_bytes)
    return next((dial for dial in found if _is_within(dial, costs=costs, request=request)), None)


def _uniform_dials(costs: DialCosts, *, request: AutoRequest) -> list[Dial]:
    options, batches = _options(request), _batches(request)
    return Solver(costs=costs, options=options, batches=batches, goal="memory", limit=inf).uniform_dials()


def _simplicity(dial: Dial) -> tuple[int, int, int, int]:
    choice = dial.choices[0] if dial.choices else Choice(dial.root, "none")
    return RECOMPUTES.index(choice.recompute), list(STRATEGIES).index(choice.row), dial.mesh.replicate, -dial.batch


def _is_within(dial: Dial, *, costs: DialCosts, request: AutoRequest) -> bool:
    limit = _limit(costs, request=request)
    if costs.tensor_bytes(dial) > limit or not costs.fits_host(dial):
        return False
    return request.quick or limit == inf or costs.device_bytes(dial, limit_bytes=limit) <= limit


def _offloaded(costs: DialCosts, *, request: AutoRequest) -> Solved | None:
    """Return the first uniform dial that fits with activations, states, or both in host memory."""
    if not LIMITS[request.plan.engine].has("offload_states"):
        return None
    rows = request.rows or strategies_of(request.plan.engine)
    sharded = [row for row in rows if STRATEGIES[row].grads is SHARDED]
    for activations, states in ((True, False), (False, True), (True, True)):
        has_owners = request.plan.owned or needs_whole_matrices(request.optimizer)
        if states and (request.plan.captures or has_owners or not sharded):
            continue
        plan = replace(request.plan, offload_activations=activations, offload_states=states)
        own = replace(request, plan=plan, rows=tuple(sharded) if states else tuple(rows))
        found = _based_on(costs, plan)
        dial = _first_fit(found, request=own)
        if dial is not None:
            num_replays = costs.num_replays + found.num_replays
            return Solved(candidate=_cost(found, dial, request=own), num_replays=num_replays)
    return None


def _nothing_fits(costs: DialCosts, *, request: AutoRequest) -> str:
    least = min(map(costs.tensor_bytes, _uniform_dials(costs, request=request)))
    capacity = capacity_bytes(with_budget(request.cluster, budget_bytes=request.budget_bytes)) or 0
    return (
        f"{costs.spec.name}: no plan for {request.cluster} fits into {bytes_text(capacity)} per device; the smallest "
        f"needs {bytes_text(round(least * (1 + costs.band)))} with its error band: take a larger budget, more "
        "devices, or a smaller micro-batch or sample"
    )
