"""Plans for a cluster, each at its best batch: which fit, which to take, and what would fit if none does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardwise.hardware import Cluster
from shardwise.mesh import Mesh
from shardwise.placement import STRATEGIES
from shardwise.plan import Plan
from shardwise.planner.constants import ERROR_BANDS
from shardwise.planner.memory import MemoryEstimate, estimate
from shardwise.planner.traffic import sent_bytes
from shardwise.spec import ModelSpec

MOST_BATCH = 2**16
"""No search goes beyond this."""

SpecFor = Callable[[Plan], ModelSpec]
"""The spec with the traces that a plan needs; it may have to be traced first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan with its cost on a cluster. `fits` is yes, tight (within the error band), no, or unknown."""

    plan: Plan
    cluster: Cluster
    memory: MemoryEstimate
    fits: str
    seq: int | None
    sent_bytes: int

    @property
    def capacity_bytes(self) -> int | None:
        return capacity_bytes(self.cluster)

    @property
    def batch(self) -> int:
        assert self.plan.micro_batch is not None
        return self.plan.micro_batch

    @property
    def error_band(self) -> float:
        return ERROR_BANDS[self.plan.engine]


def capacity_bytes(cluster: Cluster) -> int | None:
    return cluster.device.capacity_bytes.value if cluster.device.capacity_bytes is not None else None


def cost(spec: ModelSpec, *, plan: Plan, cluster: Cluster, optimizer: str) -> Candidate:
    """A plan whose micro-batch is set, on a cluster."""
    memory = _memory(spec, plan=plan, cluster=cluster, optimizer=optimizer, quick=True)
    if _fits(memory.device_bytes, plan=plan, cluster=cluster) != "no":
        # What its tensors alone are too large for, the allocator cannot make fit.
        memory = _memory(spec, plan=plan, cluster=cluster, optimizer=optimizer)
    return Candidate(
        plan=plan,
        cluster=cluster,
        memory=memory,
        fits=_fits(memory.device_bytes, plan=plan, cluster=cluster),
        seq=spec.seq,
        sent_bytes=sent_bytes(spec, plan=plan, num_ranks=cluster.num_ranks),
    )


def _memory(spec: ModelSpec, *, plan: Plan, cluster: Cluster, optimizer: str, quick: bool = False) -> MemoryEstimate:
    device = cluster.device
    capacity = capacity_bytes(cluster)
    assert plan.micro_batch is not None
    return estimate(
        spec,
        plan=plan,
        num_ranks=cluster.num_ranks,
        batch=plan.micro_batch,
        optimizer=optimizer,
        device="cpu" if device.name == "cpu" else "cuda",
        context_bytes=device.context_bytes.value if device.context_bytes else None,
        communicator_bytes=device.communicator_bytes.value if device.communicator_bytes else None,
        limit_bytes=round(capacity / (1 + ERROR_BANDS[plan.engine])) if capacity is not None else None,
        quick=quick,
    )


def _fits(device_bytes: int, *, plan: Plan, cluster: Cluster) -> str:
    capacity = capacity_bytes(cluster)
    if capacity is None:
        return "unknown"
    if device_bytes * (1 + ERROR_BANDS[plan.engine]) <= capacity:
        return "yes"
    return "tight" if device_bytes <= capacity else "no"


def largest_batch(spec: ModelSpec, *, plan: Plan, cluster: Cluster, optimizer: str) -> int:
    """The largest micro-batch that fits; 1 where none does, or where nothing is known that grows with it.

    Searched by what is allocated, which costs nothing; below that, by what is reserved for it.
    """
    if capacity_bytes(cluster) is None or not spec.traces:
        return 1

    def memory(batch: int, *, quick: bool) -> MemoryEstimate:
        return _memory(spec, plan=replace(plan, micro_batch=batch), cluster=cluster, optimizer=optimizer, quick=quick)

    def fits(batch: int, *, quick: bool) -> bool:
        return _fits(memory(batch, quick=quick).device_bytes, plan=plan, cluster=cluster) == "yes"

    batch = _largest(lambda batch: fits(batch, quick=True))
    return batch if batch == 1 else _refined(batch, fits=lambda batch: fits(batch, quick=False))


def _refined(most: int, *, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, to a fiftieth: each look runs the allocator's model."""
    if fits(most):
        return most
    low, high = 1, most
    while high - low > max(1, low // 50):
        # What the allocator adds is mostly a tenth, so the answer is likely to be near the upper end.
        middle = min(high - 1, max(low + 1, high - max(1, (high - low) // 8)))
        if not fits(middle):
            high = middle
            middle = (low + high) // 2
            if middle == low or not fits(middle):
                high = max(middle, low + 1)
                continue
        low = middle
    return low


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest number up to MOST_BATCH that fits, if all below it do; at least 1."""
    low, high = 1, 2
    while high <= MOST_BATCH and fits(high):
        low, high = high, 2 * high
    high = min(high, MOST_BATCH + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def candidates(
    spec_for: SpecFor, *, plan: Plan, strategies: Sequence[str], cluster: Cluster, optimizer: str, goal: str
) -> list[Candidate]:
    """Each strategy at the plan's micro-batch; without one, at the largest that fits, or for memory's sake at 1."""
    found = []
    for strategy in strategies:
        chosen = replace(plan, strategy=strategy, mesh=plan.mesh or Mesh(shard=cluster.num_ranks))
        spec = spec_for(chosen)
        batch = plan.micro_batch
        if batch is None:
            searches = goal == "throughput"
            batch = largest_batch(spec, plan=chosen, cluster=cluster, optimizer=optimizer) if searches else 1
        found.append(cost(spec, plan=replace(chosen, micro_batch=batch), cluster=cluster, optimizer=optimizer))
    return found


def recommend(found: Sequence[Candidate], *, goal: str) -> tuple[int | None, str]:
    """The candidate to take, and why; None where none fits.

    Without a prediction of time: the simplest strategy that fits, or the smallest peak for memory's sake.
    """
    for verdict in ("yes", "tight"):
        fitting = [index for index, candidate in enumerate(found) if candidate.fits == verdict]
        if not fitting:
            continue
        if goal == "memory":
            best = min(fitting, key=lambda index: found[index].memory.allocated_bytes)
            return best, "the smallest peak"
        order = list(STRATEGIES)
        best = min(fitting, key=lambda index: order.index(found[index].plan.strategy))
        return (
            best,
            f"the simplest strategy that {'fits' if verdict == 'yes' else 'may fit'}; time is not predicted yet",
        )
    if all(candidate.fits == "unknown" for candidate in found):
        return None, "whether it fits is not known: the device's capacity is not"
    return None, "nothing fits"


def way_out(
    spec_for: SpecFor, *, plan: Plan, strategies: Sequence[str], cluster: Cluster, optimizer: str
) -> str | None:
    """The smallest change that fits, as options of the command line; None where nothing that is known helps."""
    for words, changed, changed_strategies, changed_cluster in _changes(plan, strategies=strategies, cluster=cluster):
        for strategy in changed_strategies:
            mesh = Mesh(shard=changed_cluster.num_ranks)
            chosen = replace(changed, strategy=strategy, mesh=mesh)
            if plan.engine == "torch" and (strategy in ("zero1", "zero2") or chosen.recompute != "none"):
                continue
            if cost(spec_for(chosen), plan=chosen, cluster=changed_cluster, optimizer=optimizer).fits == "yes":
                also = f" --strategy {strategy}" if strategy not in strategies else ""
                return words + also
    return None


Changed = tuple[str, Plan, Sequence[str], Cluster]


def _changes(plan: Plan, *, strategies: Sequence[str], cluster: Cluster) -> list[Changed]:
    """Changes from the smallest to the largest; each with a batch."""
    batch = plan.micro_batch or 1
    at = replace(plan, micro_batch=batch)
    every = list(STRATEGIES)
    found: list[Changed] = [("", at, [name for name in every if name not in strategies], cluster)]
    if plan.precision == "fp32":
        found.append(("--precision bf16", replace(at, precision="bf16"), every, cluster))
    for recompute in ("selective", "full"):
        found.append((f"--recompute {recompute}", replace(at, recompute=recompute), every, cluster))
    for recompute in (plan.recompute, "full"):
        for smaller in _halves(batch):
            words = f"--micro-batch {smaller}" + (f" --recompute {recompute}" if recompute != plan.recompute else "")
            found.append((words, replace(plan, micro_batch=smaller, recompute=recompute), every, cluster))
    for recompute in (plan.recompute, "full"):
        for larger in _doubles(cluster):
            words = f"{larger.num_ranks} devices" + (f" and --recompute {recompute}" if recompute != "none" else "")
            found.append((words, replace(plan, micro_batch=1, recompute=recompute), ["fsdp"], larger))
    return found


def _halves(batch: int) -> list[int]:
    found = []
    while batch > 1:
        batch //= 2
        found.append(batch)
    return found


def _doubles(cluster: Cluster) -> list[Cluster]:
    """The cluster with 2, 4, 8 … times as many devices; the links do not matter to memory."""
    return [replace(cluster, devices_per_node=cluster.devices_per_node * 2**power) for power in range(1, 11)]
