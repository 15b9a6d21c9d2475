"""The same training on 8 to 16,384 devices, with the best plan for each number."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.base.errors import InvalidCluster
from shardwise.hardware import Cluster
from shardwise.hardware.cluster import make_cluster
from shardwise.plan import Plan
from shardwise.planner.search.candidates import Candidate, SpecFor, candidates
from shardwise.planner.search.recommend import best_of

SIZES = tuple(2**power for power in range(3, 15))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """The best plan on a number of devices. `efficiency`: samples per second per device, relative to the smallest."""

    candidate: Candidate
    efficiency: float

    @property
    def num_ranks(self) -> int:
        return self.candidate.cluster.num_ranks

    @property
    def global_batch(self) -> int:
        return self.candidate.global_batch


def scaling(
    spec_for: SpecFor,
    *,
    plan: Plan,
    found: Sequence[Candidate],
    cluster: Cluster,
    optimizer: str,
    recomputes: Sequence[str] = (),
) -> list[Scaled]:
    """Return the fastest plan on each size where one fits, with the cluster's nodes and links.

    A strategy keeps its micro-batch and its recompute in `found`, so that the global batch grows with the devices; one
    that did not fit there gets the largest micro-batch that fits, and the best of `recomputes`.
    """
    fitting = {one.plan.strategy: one for one in reversed(found) if one.fits in ("yes", "tight")}
    rows: list[Scaled] = []
    for size in SIZES:
        if size % cluster.devices_per_node:
            continue
        larger = _grown(cluster, num_nodes=size // cluster.devices_per_node)
        options: list[Candidate] = []
        for strategy in dict.fromkeys(one.plan.strategy for one in found):
            first, asked = fitting.get(strategy), plan
            if first is not None:
                asked = replace(plan, micro_batch=first.batch, recompute=first.plan.recompute)
            options += candidates(
                spec_for,
                plan=asked,
                strategies=[strategy],
                cluster=larger,
                optimizer=optimizer,
                goal="throughput",
                quick=True,
                recomputes=() if first is not None else recomputes,
            )
        best = best_of([one for one in options if one.fits == "yes" and one.time is not None])
        if best is not None:
            smallest = rows[0].candidate if rows else best
            speed, first_speed = (one.samples_per_s / one.cluster.num_ranks for one in (best, smallest))
            efficiency = speed / first_speed
            rows.append(Scaled(candidate=best, efficiency=efficiency))
    return rows


def _grown(cluster: Cluster, *, num_nodes: int) -> Cluster:
    if num_nodes > 1 and cluster.fabric is None and cluster.device.nic is None:
        raise InvalidCluster(
            f"what links nodes of {cluster.device.name} is not known: say it, such as "
            f"2x{cluster.devices_per_node}x{cluster.device.name}@ib-8x200"
        )
    return make_cluster(
        cluster.device,
        num_nodes=num_nodes,
        devices_per_node=cluster.devices_per_node,
        fabric=cluster.fabric if num_nodes > 1 else None,
        link=cluster.link,
    )
