"""A request for a plan, and what follows from it: the memory, the micro-batches and the choices of a unit."""

from dataclasses import dataclass, replace
from math import inf
from typing import Any

from shardwise.base.errors import ShardwiseError
from shardwise.hardware import Cluster
from shardwise.hardware.cluster import capacity_bytes, with_budget
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS, strategies_of
from shardwise.plan.placement import Mesh
from shardwise.planner.memory.states import needs_whole_matrices
from shardwise.planner.search.dial import ACTIVATIONS, STATES, Choice
from shardwise.planner.search.dial_cost import DialCosts
from shardwise.planner.search.micro_batches import MicroBatches, meshes, micro_batches_of

MOST_TIMES = 1024
"""The most devices that are tried where nothing fits, as a multiple of those that were asked for."""
RECOMPUTES = ("none", "selective", "full")
# The row whose units may be in host memory, and what of them may.
HOST_ROW = "fsdp"
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


def with_settings(request: AutoRequest, **settings: Any) -> AutoRequest:
    return replace(request, plan=replace(request.plan, **settings))


def limit_bytes(costs: DialCosts, *, request: AutoRequest) -> float:
    """Return the bytes that a plan may need to fit with its error band."""
    capacity = capacity_bytes(with_budget(request.cluster, budget_bytes=request.budget_bytes))
    return inf if capacity is None else capacity / (1 + costs.band)


def batches_of(request: AutoRequest) -> MicroBatches:
    """Return the micro-batches that a request allows; only 1 if the capacity is unknown."""
    found = micro_batches_of(request.plan, global_batch=request.global_batch, num_ranks=request.cluster.num_ranks)
    is_bounded = request.budget_bytes is not None or capacity_bytes(request.cluster) is not None
    return found if is_bounded or not found.is_free else replace(found, micro_batch=1)


def options_of(request: AutoRequest, *, on_host: bool = False) -> dict[Mesh, list[Choice]]:
    """Return the choices of a unit on each mesh; rows that shard nothing are only tried on one."""
    found: dict[Mesh, list[Choice]] = {}
    ways = request.recomputes if may_recompute(request.plan) else ("none",)
    places = _PLACES if on_host else _PLACES[:1]
    for row in request.rows or strategies_of(request.plan.engine):
        for mesh in meshes(row, plan=request.plan, cluster=request.cluster):
            found.setdefault(mesh, []).extend(Choice(row, way, place) for way in ways for place in places)
    return found


def may_recompute(plan: Plan) -> bool:
    return LIMITS[plan.engine].why_not(replace(plan, recompute="full")) is None


def uses_host(plan: Plan) -> bool:
    return bool(plan.offload_states or plan.offload_activations)


def may_use_host(request: AutoRequest) -> bool:
    """Return whether units may be given host memory: the engine can, the link is known, the plan has not decided."""
    plan, device = request.plan, request.cluster.device
    is_free = not uses_host(plan) and request.cluster.host_bytes != 0
    hindered = plan.owned or needs_whole_matrices(request.optimizer)
    rows = request.rows or strategies_of(plan.engine)
    can = LIMITS[plan.engine].has("offload_states") and device.host_link is not None and HOST_ROW in rows
    return is_free and can and not hindered and device.torch_type != "cpu" and request.goal == "throughput"


def may_update_in_backward(request: AutoRequest) -> bool:
    plan = request.plan
    return (
        LIMITS[plan.engine].has("update")
        and not plan.backward_hindrance
        and not needs_whole_matrices(request.optimizer)
    )
