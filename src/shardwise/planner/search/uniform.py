"""Plans with the same choice for every unit: what is left where time is not predicted, or nothing fits."""

from dataclasses import replace
from math import inf

from shardwise.base.vocabulary.quantities import bytes_text
from shardwise.hardware.cluster import capacity_bytes, with_budget
from shardwise.plan.limits import LIMITS, strategies_of
from shardwise.plan.placement import STRATEGIES
from shardwise.planner.memory.states import needs_whole_matrices
from shardwise.planner.search.dial import Choice, Dial
from shardwise.planner.search.dial_cost import DialCosts
from shardwise.planner.search.request import (
    HOST_ROW,
    RECOMPUTES,
    AutoRequest,
    batches_of,
    limit_bytes,
    may_use_host,
    options_of,
)
from shardwise.planner.search.solver import Solver


def first_fit(costs: DialCosts, *, request: AutoRequest) -> Dial | None:
    """Return the simplest uniform dial that fits: first without recomputation, and with the least sharding."""
    found = sorted(_uniform_dials(costs, request=request), key=_simplicity)
    if request.goal == "memory":
        found.sort(key=costs.tensor_bytes)
    return next((dial for dial in found if _is_within(dial, costs=costs, request=request)), None)


def first_fit_offloaded(costs: DialCosts, *, request: AutoRequest) -> tuple[DialCosts, Dial | None]:
    """Return the first uniform dial that fits with activations, states, or both in host memory, and its costs."""
    if not LIMITS[request.plan.engine].has("offload_states"):
        return costs, None
    rows = request.rows or strategies_of(request.plan.engine)
    sharded = [row for row in rows if STRATEGIES[row].grads.is_sharded]
    for activations, states in ((True, False), (False, True), (True, True)):
        has_owners = request.plan.owned or needs_whole_matrices(request.optimizer)
        if states and (has_owners or not sharded):
            continue
        plan = replace(request.plan, offload_activations=activations, offload_states=states)
        own = replace(request, plan=plan, rows=tuple(sharded) if states else tuple(rows))
        found = costs.based_on(plan)
        dial = first_fit(found, request=own)
        if dial is not None:
            return found, dial
    return costs, None


def nothing_fits(costs: DialCosts, *, request: AutoRequest) -> str:
    """Return the sentence for it, with what the smallest plan would need."""
    dials = _uniform_dials(costs, request=request)
    if may_use_host(request):
        hosted = _uniform_dials(costs, request=replace(request, rows=(HOST_ROW,)), on_host=True)
        dials += filter(costs.fits_host, hosted)
    least = min(map(costs.tensor_bytes, dials))
    capacity = capacity_bytes(with_budget(request.cluster, budget_bytes=request.budget_bytes)) or 0
    return (
        f"{costs.spec.name}: no plan for {request.cluster} fits into {bytes_text(capacity)} per device; the smallest "
        f"needs {bytes_text(round(least * (1 + costs.band)))} with its error band: take a larger budget, more "
        "devices, or a smaller micro-batch or sample"
    )


def _uniform_dials(costs: DialCosts, *, request: AutoRequest, on_host: bool = False) -> list[Dial]:
    options, batches = options_of(request, on_host=on_host), batches_of(request)
    return Solver(costs=costs, options=options, batches=batches, goal="memory", limit=inf).uniform_dials()


def _simplicity(dial: Dial) -> tuple[int, int, int, int]:
    choice = dial.choices[0] if dial.choices else Choice(dial.root, "none")
    return RECOMPUTES.index(choice.recompute), list(STRATEGIES).index(choice.row), dial.mesh.replicate, -dial.batch


def _is_within(dial: Dial, *, costs: DialCosts, request: AutoRequest) -> bool:
    limit = limit_bytes(costs, request=request)
    if costs.tensor_bytes(dial) > limit or not costs.fits_host(dial):
        return False
    return request.quick or limit == inf or costs.device_bytes(dial, limit_bytes=limit) <= limit
