"""The smallest change of a plan or of the cluster that fits, if nothing does. No torch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from shardwise.hardware import Cluster
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS, strategies_of
from shardwise.plan.mesh import Mesh
from shardwise.planner.search.candidates import Candidate, SpecFor, cost, largest_batch

Changed = tuple[Plan, Sequence[str], Cluster]
"""A plan, the strategies to try with it, and a cluster. No micro-batch means the largest that fits."""


def way_out(
    spec_for: SpecFor, *, plan: Plan, strategies: Sequence[str], cluster: Cluster, optimizer: str
) -> Candidate | None:
    """Return the smallest change of the plan or the cluster that fits, or None."""

    def fitting(changes: Iterable[Changed]) -> Iterator[Candidate]:
        for changed, changed_strategies, changed_cluster in changes:
            for strategy in changed_strategies:
                chosen = replace(changed, strategy=strategy, mesh=Mesh(shard=changed_cluster.num_ranks))
                if LIMITS[plan.engine].why_not_planned(chosen) is not None:
                    continue
                spec = spec_for(chosen)
                if chosen.micro_batch is None:
                    most = largest_batch(spec, plan=chosen, cluster=changed_cluster, optimizer=optimizer)
                    chosen = replace(chosen, micro_batch=min(most, max(1, (plan.micro_batch or 1) - 1)))
                found = cost(spec, plan=chosen, cluster=changed_cluster, optimizer=optimizer)
                if found.fits == "yes":
                    yield found

    of_plan = next(fitting(_changes(plan, strategies=strategies, cluster=cluster)), None)
    if of_plan is not None:
        return of_plan
    for change in _smaller(plan, cluster=cluster):
        smaller = max(fitting([change]), key=lambda found: found.batch, default=None)
        if smaller is not None:
            return smaller
    return next(fitting(_larger(plan, cluster=cluster)), None)


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


def _smaller(plan: Plan, *, cluster: Cluster) -> list[Changed]:
    """Return the same with a smaller batch, if there is one."""
    if (plan.micro_batch or 1) == 1:
        return []
    least = _in_16_bits(_reduced(plan))
    ways = [replace(one, micro_batch=None, recompute=way) for one in (plan, least) for way in (plan.recompute, "full")]
    return [(changed, strategies_of(plan.engine), cluster) for changed in ways]


def _larger(plan: Plan, *, cluster: Cluster) -> list[Changed]:
    """Return 2, 4, 8 … times as many devices with the last strategy, which shards the most; links are ignored."""
    return [
        (
            replace(one, micro_batch=1, recompute=recompute),
            strategies_of(plan.engine)[-1:],
            replace(cluster, devices_per_node=cluster.devices_per_node * 2**power),
        )
        for one in (_reduced(plan), _in_16_bits(_reduced(plan)))
        for recompute in (plan.recompute, "full")
        for power in range(1, 11)
    ]
