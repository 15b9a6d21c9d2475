"""The smallest changes of a plan or of the cluster that fit, if nothing does. No torch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from shardwise.hardware import Cluster
from shardwise.hardware.cluster import make_cluster
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS, strategies_of
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import ACROSS
from shardwise.planner.search.auto import solve_plan
from shardwise.planner.search.candidates import Candidate, SpecFor, cost, largest_batch
from shardwise.planner.search.request import MOST_TIMES, AutoRequest, NoPlanFits

PER_NODE = 8
"""Devices of a rented machine; fewer are rented as 1, 2 or 4 of them."""

Changed = tuple[Plan, Sequence[str], Cluster]
"""A plan, the strategies to try with it, and a cluster."""


def ways_out(
    spec_for: SpecFor,
    *,
    plan: Plan,
    strategies: Sequence[str],
    cluster: Cluster,
    optimizer: str,
) -> list[Candidate]:
    """Return the smallest change of the plan that fits on these devices.

    If only a tight one does, or one in host memory, it is followed by the fewest devices that fit without it. If none
    does, these are all; if no number of devices does, nothing is.
    """

    def fitting(changes: Iterable[Changed], fits: str = "yes") -> Iterator[Candidate]:
        for changed, changed_strategies, where in changes:
            for strategy in changed_strategies:
                chosen = replace(changed, strategy=strategy, mesh=Mesh(shard=where.num_ranks), across=ACROSS[0])
                if LIMITS[plan.engine].why_not_planned(chosen) is None:
                    found = cost(spec_for(chosen), plan=chosen, cluster=where, optimizer=optimizer)
                    if found.fits == fits:
                        yield found

    of_plan = next(fitting(_changes(plan, strategies=strategies, cluster=cluster)), None)
    if of_plan is not None:
        return [of_plan]
    for ways in _smaller(spec_for, plan=plan, cluster=cluster, optimizer=optimizer):
        smaller = max(fitting(ways), key=lambda found: found.batch, default=None)
        if smaller is not None:
            return [smaller]
    request = AutoRequest(plan=plan, cluster=cluster, optimizer=optimizer)
    per_unit = _per_unit(spec_for, request=request)
    if per_unit is not None and not (per_unit.plan.offload_states or per_unit.plan.offload_activations):
        return [per_unit]
    tight = next(fitting(_changes(plan, strategies=strategies, cluster=cluster), "tight"), None)
    larger = next(fitting(_larger(plan, cluster=cluster)), None)
    return [one for one in (tight or per_unit, larger) if one is not None]


def _changes(plan: Plan, *, strategies: Sequence[str], cluster: Cluster) -> list[Changed]:
    """Return other plans of the same batch, from the smallest change to the largest."""
    at = replace(plan, micro_batch=plan.micro_batch or 1)
    every = strategies_of(plan.engine)
    found: list[Changed] = [(at, [name for name in every if name not in strategies], cluster)]
    reduced = _reduced(at)
    if reduced != at:
        found.append((reduced, every, cluster))
    if plan.precision == "fp32":
        found.append((replace(reduced, precision="bf16"), every, cluster))
    found += [(replace(one, recompute=way), every, cluster) for way in ("selective", "full") for one in (at, reduced)]
    # It rounds the sums of gradients, so what keeps them exact is tried before.
    least = _in_16_bits(reduced)
    if least != reduced:
        found += [(replace(least, recompute=way), every, cluster) for way in (plan.recompute, "selective", "full")]
    return list({(repr(one), tuple(names)): (one, names, where) for one, names, where in found}.values())


def _reduced(plan: Plan) -> Plan:
    """Return the plan with gradients reduced in each of its passes."""
    return replace(plan, accumulate_reduced=plan.accumulate > 1)


def _in_16_bits(plan: Plan) -> Plan:
    """Return the plan with gradients that are summed in the dtype of the computation."""
    return replace(plan, reduce_dtype=plan.precision) if plan.precision in ("bf16", "fp16") else plan


def _smaller(spec_for: SpecFor, *, plan: Plan, cluster: Cluster, optimizer: str) -> Iterator[list[Changed]]:
    """Yield the same with a smaller micro-batch and more passes, so that a step has as many samples.

    Each list has all strategies, each with the largest micro-batch that divides the given one and fits.
    """
    given = plan.micro_batch or 1
    divisors = [batch for batch in range(given - 1, 0, -1) if given % batch == 0]
    for changes in (_reduced, lambda one: _in_16_bits(_reduced(one))):
        for way in dict.fromkeys((plan.recompute, "full")):
            found: list[Changed] = []
            for strategy in strategies_of(plan.engine) if divisors else ():
                passes = changes(replace(plan.under(strategy), recompute=way, accumulate=plan.accumulate * given))
                passes = replace(passes, mesh=Mesh(shard=cluster.num_ranks), across=ACROSS[0])
                if LIMITS[plan.engine].why_not_planned(passes) is not None:
                    continue
                most = largest_batch(spec_for(passes), plan=passes, cluster=cluster, optimizer=optimizer)
                batch = next((batch for batch in divisors if batch <= most), 1)
                sized = replace(passes, micro_batch=batch, accumulate=plan.accumulate * (given // batch))
                found.append((sized, [strategy], cluster))
            yield found


def _per_unit(spec_for: SpecFor, *, request: AutoRequest) -> Candidate | None:
    """Return what the solver finds: choices for each unit or, if none fit, host memory; None without such an engine."""
    if not LIMITS[request.plan.engine].has("offload_states"):
        return None
    try:
        return solve_plan(spec_for, request=request).candidate
    except NoPlanFits:
        return None


def _larger(plan: Plan, *, cluster: Cluster) -> Iterator[Changed]:
    """Yield more devices, the fewest first, with the last strategy, which shards the most."""
    for where in larger_clusters(cluster):
        for one in (_reduced(plan), _in_16_bits(_reduced(plan))):
            for recompute in dict.fromkeys((plan.recompute, "full")):
                yield replace(one, micro_batch=1, recompute=recompute), strategies_of(plan.engine)[-1:], where


def larger_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """Yield clusters of the same devices, as they are rented: 2, 4 or 8 of them, then 2, 4, 8 … machines of 8.

    Where the links between machines are not known, all devices are in one machine: their memory is the same.
    """
    num_ranks, per_node = cluster.num_ranks, max(PER_NODE, cluster.devices_per_node)
    is_linked = cluster.fabric is not None or cluster.device.nic is not None
    for size in (2**power for power in range(1, 24)):
        if not num_ranks < size <= MOST_TIMES * num_ranks:
            continue
        nodes = size // per_node if is_linked and size > per_node and size % per_node == 0 else 1
        yield make_cluster(
            cluster.device,
            num_nodes=nodes,
            devices_per_node=size // nodes,
            fabric=cluster.fabric if nodes > 1 else None,
            link=cluster.link,
            host_bytes=cluster.host_bytes,
        )
