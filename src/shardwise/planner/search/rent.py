"""Which devices to rent for a training: every kind and count with its best plan, days and cost. No torch."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.hardware import Cluster, Device
from shardwise.hardware.cluster import make_cluster
from shardwise.hardware.prices import Price
from shardwise.plan import Plan
from shardwise.plan.limits import strategies_of
from shardwise.plan.placement import Mesh
from shardwise.planner.search.auto import solve_plan
from shardwise.planner.search.candidates import Candidate, SpecFor, candidates, cost
from shardwise.planner.search.larger_clusters import PER_NODE
from shardwise.planner.search.recommend import PAIR_BAND, best_of
from shardwise.planner.search.request import RECOMPUTES, AutoRequest, NoPlanFits
from shardwise.planner.search.training_cost import TrainingCost, training_cost

COUNTS = (1, 2, 4, PER_NODE)
"""Devices of one rented machine."""

MACHINES = (2, 4, 8)
"""Machines of PER_NODE devices, which are tried if one is not enough."""

LOOKS = 8
"""Rentals for which the allocator's model runs: those that are best without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A training to rent for. `max_price` in dollars for all of it; None for any."""

    plan: Plan
    num_tokens: float
    optimizer: str = "adamw"
    max_price: float | None = None
    max_days: float | None = None

    def is_in_time(self, one: TrainingCost) -> bool:
        return self.max_days is None or most_days(one) <= self.max_days

    def is_met(self, one: TrainingCost) -> bool:
        return self.is_in_time(one) and (self.max_price is None or most_cost(one) <= self.max_price)

    def rank(self, one: TrainingCost) -> tuple[bool, float]:
        """Return the place of a rental in the table: by days with a limit of price alone, else by cost."""
        by_days = self.max_price is not None and self.max_days is None
        return not self.is_met(one), most_days(one) if by_days else most_cost(one)


def most_cost(one: TrainingCost) -> float:
    """Return the cost at the upper end of its error band: what counts for limits and ranks, as memory does for fits."""
    assert one.cost is not None
    return one.cost * (1 + one.candidate.time_band.value)


def most_days(one: TrainingCost) -> float:
    return one.days * (1 + one.candidate.time_band.value)


def rentals(
    spec_for: SpecFor,
    *,
    devices: Mapping[Device, Price],
    wish: Wish,
    looks: int | None = LOOKS,
    named: Collection[str] = (),
) -> list[TrainingCost]:
    """Return the best plan on each rental that fits, the recommended one first and then by `Wish.rank`.

    Host memory is used on one GPU. Several machines are tried only if nothing fits on one without it, or in time.
    `looks`: how many rentals are returned, computed with the allocator's model; None for all, which is the exhaustive
    search. The best rental of each kind in `named` is among them, if one fits.
    """
    found: list[TrainingCost] = []
    for sizes in ([(1, count) for count in COUNTS], [(nodes, PER_NODE) for nodes in MACHINES]):
        clusters = [cluster for device in devices for cluster in _clusters(device, price=devices[device], sizes=sizes)]
        found += _costs(spec_for, clusters=clusters, devices=devices, wish=wish, looks=looks, named=named)
        if any(wish.is_in_time(one) and not one.candidate.memory.host_bytes for one in found):
            break
    first = recommended(found, wish=wish)
    return _best_ranked(found, key=lambda one: (one is not first, wish.rank(one)), looks=looks, named=named)


def _best_ranked(
    found: Sequence[TrainingCost], *, key: Callable[[TrainingCost], Any], looks: int | None, named: Collection[str]
) -> list[TrainingCost]:
    """Return the first `looks` by rank, and the first of each named kind."""
    ranked = sorted(found, key=key)
    kinds = [one.candidate.cluster.device.name for one in ranked]
    firsts = {kinds.index(kind) for kind in named if kind in kinds}
    return [one for index, one in enumerate(ranked) if looks is None or index < looks or index in firsts]


def recommended(found: Sequence[TrainingCost], *, wish: Wish) -> TrainingCost | None:
    """Return the rental that meets the wish at the lowest cost; of those that cost about as much, the soonest done.

    With a limit of price alone, the soonest done; None if nothing meets the wish. A kind on whose architecture nothing
    was measured is never taken for its speed, which is not known.
    """
    met = [one for one in found if wish.is_met(one)]
    if not met:
        return None
    if wish.max_price is None or wish.max_days is not None:
        least = min(map(most_cost, met))
        met = [one for one in met if round(most_cost(one) / least - 1, 2) <= PAIR_BAND]
    measured = [one for one in met if one.candidate.time_band.is_of_a_measured_kind]
    return min(measured, key=most_days) if measured else min(met, key=most_cost)


def best_on(
    spec_for: SpecFor, *, plan: Plan, cluster: Cluster, optimizer: str, quick: bool = False
) -> Candidate | None:
    """Return the best of all strategies and recompute modes that fit, each at its largest micro-batch.

    Where none fits: the solver's plan with the host memory of the cluster.
    """
    found = [
        one
        for one in candidates(
            spec_for,
            plan=plan,
            strategies=strategies_of(plan.engine),
            cluster=cluster,
            optimizer=optimizer,
            goal="throughput",
            quick=quick,
            recomputes=RECOMPUTES,
        )
        if one.fits == "yes" and one.time is not None
    ]
    if found or not cluster.host_bytes:
        return best_of(found)
    return best_in_host_memory(
        spec_for, request=AutoRequest(plan=plan, cluster=cluster, optimizer=optimizer, quick=quick)
    )


def best_in_host_memory(spec_for: SpecFor, *, request: AutoRequest) -> Candidate | None:
    """Return the plan that the solver finds with host memory, if one with all states there fits: that is soon known."""
    for update in ("device", "host"):
        least = replace(
            request.plan,
            strategy="fsdp",
            mesh=Mesh(shard=request.cluster.num_ranks),
            recompute="full",
            micro_batch=1,
            offload_states=True,
            offload_update=update,
        )
        smallest = cost(
            spec_for(least), plan=least, cluster=request.cluster, optimizer=request.optimizer, quick=request.quick
        )
        if smallest.fits == "yes" and smallest.time is not None:
            try:
                return solve_plan(spec_for, request=request, fixed=()).candidate
            except NoPlanFits:
                return None
    return None


def _clusters(device: Device, *, price: Price, sizes: Sequence[tuple[int, int]]) -> Iterator[Cluster]:
    for nodes, count in sizes:
        if nodes == 1 or device.nic is not None:
            # Not for several GPUs: the solver would run for each number of them.
            host_bytes = price.host_bytes if count == nodes == 1 else 0
            yield make_cluster(device, num_nodes=nodes, devices_per_node=count, fabric=None, host_bytes=host_bytes)


def _costs(
    spec_for: SpecFor,
    *,
    clusters: Sequence[Cluster],
    devices: Mapping[Device, Price],
    wish: Wish,
    looks: int | None,
    named: Collection[str],
) -> list[TrainingCost]:
    """Return the costs on those clusters on which something fits; the best `looks` of them."""

    def costs(among: Sequence[Cluster], *, quick: bool) -> list[TrainingCost]:
        best = [
            best_on(spec_for, plan=wish.plan, cluster=cluster, optimizer=wish.optimizer, quick=quick)
            for cluster in among
        ]
        found = (
            training_cost(one, num_tokens=wish.num_tokens, price_per_gpu_hour=devices[one.cluster.device].per_gpu_hour)
            for one in best
            if one is not None
        )
        return [one for one in found if one is not None]

    if looks is None:
        return costs(clusters, quick=False)
    screened = costs(clusters, quick=True)
    best = _best_ranked(screened, key=wish.rank, looks=looks, named=named)
    return costs([one.candidate.cluster for one in best], quick=False)
