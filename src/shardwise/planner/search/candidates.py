"""Plans for a cluster, each at its best batch and mesh, with their costs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from shardwise.base.vocabulary.html_table import html_table
from shardwise.base.vocabulary.quantities import bytes_text
from shardwise.hardware import Cluster
from shardwise.hardware.cluster import capacity_bytes
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS
from shardwise.plan.placement import ACROSS, STRATEGIES, Mesh
from shardwise.planner.engine_model import engine_model_of
from shardwise.planner.job import Job
from shardwise.planner.memory.peak import MemoryEstimate, estimate_job
from shardwise.planner.memory.states import may_cross
from shardwise.planner.search.micro_batches import MicroBatches, across_on, largest_fitting, meshes, micro_batches_of
from shardwise.planner.systems import OWN, System
from shardwise.planner.time.band import TimeBand, over_slower_fabric, time_band
from shardwise.planner.time.step_time import TimeEstimate, job_on, time_job
from shardwise.planner.traffic import sent_bytes
from shardwise.planner.ways import check_planned_fp8
from shardwise.program.spec import ModelSpec

# What `Candidate.fits` may be, the best first.
_FITS = ("yes", "tight", "unknown", "no")


class SpecFor(Protocol):
    """Returns the spec with the traces that plans need; may trace the model."""

    def __call__(self, *plans: Plan) -> ModelSpec: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan with its cost on a cluster. `fits` is yes, tight (within the error band), no, or unknown.

    `time` is None if it cannot be predicted (step_time.why_not_timed). `label`: its name, if not the strategy's.
    `slow_seconds`: of a step over the slowest fabric that an assumed one stands for (band.py).
    """

    plan: Plan
    cluster: Cluster
    memory: MemoryEstimate
    time: TimeEstimate | None
    fits: str
    seq: int | None
    sent_bytes: int
    system: System = OWN
    label: str = ""
    slow_seconds: float | None = None

    @property
    def name(self) -> str:
        """Its name in tables: its label, or its strategy."""
        return self.label or self.plan.strategy

    def _repr_html_(self) -> str:
        """Return the prediction as a table for notebooks: what fits, how fast, and the peak by category."""
        title = f"{self.name} on {self.cluster}: fits {self.fits}, micro-batch {self.batch}"
        if self.time is not None:
            title += f", {self.time.step_seconds:.4g} s per step"
        parts = {**self.memory.breakdown_bytes, "on the device": self.memory.device_bytes}
        rows = [(name, bytes_text(num_bytes)) for name, num_bytes in parts.items()]
        return html_table(("at the peak", "per rank"), rows, title=title)

    @property
    def global_batch(self) -> int:
        """Samples per step, over all ranks and passes."""
        return self.batch * self.plan.accumulate * self.cluster.num_ranks

    @property
    def capacity_bytes(self) -> int | None:
        return capacity_bytes(self.cluster)

    @property
    def batch(self) -> int:
        assert self.plan.micro_batch is not None
        return self.plan.micro_batch

    @property
    def node_host_bytes(self) -> int:
        """Host memory of a node, which all of its ranks fill together."""
        return self.memory.host_bytes * self.cluster.devices_per_node

    @property
    def samples_per_s(self) -> float:
        """Return the samples per second of all ranks together; 0 if the time is not predicted."""
        return self.time.samples_per_s if self.time is not None else 0.0

    @property
    def memory_band(self) -> float:
        return engine_model_of(self.plan).error_band

    @property
    def time_band(self) -> TimeBand:
        host_share = self.time.cpu_seconds / self.time.step_seconds if self.time is not None else 0.0
        slower = 0.0
        if self.time is not None and self.slow_seconds is not None:
            slower = max(self.slow_seconds / self.time.step_seconds - 1, 0.0)
        return time_band(plan=self.plan, cluster=self.cluster, host_share=host_share, system=self.system, slower=slower)


def cost(
    spec: ModelSpec,
    *,
    plan: Plan,
    cluster: Cluster,
    optimizer: str,
    quick: bool = False,
    system: System = OWN,
    as_graphs: bool = False,
) -> Candidate:
    """Return a plan, whose micro-batch is set, with its cost on a cluster; `quick`: without the allocator's model.

    `system`: the one that runs the plan, with the time and the memory that it adds. `as_graphs`: see `job_of`.
    """
    check_planned_fp8(spec, plan=plan, device=cluster.device)
    assert plan.micro_batch is not None
    job = _job(spec, plan=plan, cluster=cluster, optimizer=optimizer, system=system, as_graphs=as_graphs)
    batch = plan.micro_batch
    memory = _memory(job, batch=batch, cluster=cluster, quick=True, system=system)
    if not quick and _fits(memory, job=job, cluster=cluster) != "no":
        # If its tensors alone do not fit, the allocator's model need not be run.
        memory = _memory(job, batch=batch, cluster=cluster, quick=False, system=system)
    return Candidate(
        plan=plan,
        cluster=cluster,
        memory=memory,
        time=time_job(job, batch=batch, cluster=cluster, system=system),
        fits=_fits(memory, job=job, cluster=cluster),
        seq=spec.seq,
        sent_bytes=sent_bytes(job),
        system=system,
        slow_seconds=None if quick else over_slower_fabric(job, batch=batch, cluster=cluster, system=system),
    )


def _job(
    spec: ModelSpec, *, plan: Plan, cluster: Cluster, optimizer: str, system: System, as_graphs: bool = False
) -> Job:
    system.check_ranks(cluster.num_ranks)
    wrapped = system.is_wrapped
    return job_on(spec, plan=plan, cluster=cluster, optimizer=optimizer, is_wrapped=wrapped, as_graphs=as_graphs)


def _memory(
    job: Job, *, batch: int, cluster: Cluster, quick: bool, system: System, stops: bool = False
) -> MemoryEstimate:
    capacity, added = capacity_bytes(cluster), system.added_bytes(job.spec, strategy=job.plan.strategy)
    limit = round(capacity / (1 + job.engine.error_band)) - added if capacity is not None else None
    expands = system.is_expandable
    found = cluster_memory(
        job, batch=batch, cluster=cluster, limit_bytes=limit, expands=expands, quick=quick, stops=stops
    )
    return found.plus(added) if added else found


def cluster_memory(
    job: Job, *, batch: int, cluster: Cluster, limit_bytes: int | None, quick: bool, expands: bool = False,
    stops: bool = False,
) -> MemoryEstimate:  # fmt: skip
    """Return the memory of a job on a cluster (peak.estimate_job)."""
    device = cluster.device
    return estimate_job(
        job,
        batch=batch,
        context_bytes=device.context_bytes.value if device.context_bytes else None,
        communicator_bytes=device.communicator_bytes.value if device.communicator_bytes else None,
        limit_bytes=limit_bytes,
        expands=expands or (cluster.expands_segments and not job.plan.captures),
        quick=quick,
        stops=stops,
    )


def fits_host(rank_bytes: int, *, cluster: Cluster) -> bool:
    """Return whether all ranks of a node may have so many bytes of host memory each."""
    return cluster.host_bytes is None or rank_bytes * cluster.devices_per_node <= cluster.host_bytes


def _fits(memory: MemoryEstimate, *, job: Job, cluster: Cluster) -> str:
    capacity, device_bytes = capacity_bytes(cluster), memory.device_bytes
    if not fits_host(memory.host_bytes, cluster=cluster):
        return "no"
    if capacity is None:
        return "unknown"
    if device_bytes * (1 + job.engine.error_band) <= capacity:
        return "yes"
    return "tight" if device_bytes <= capacity else "no"


def largest_batch(
    spec: ModelSpec, *, plan: Plan, cluster: Cluster, optimizer: str, quick: bool = False, system: System = OWN
) -> int:
    """Return the largest micro-batch that fits; 1 if none does, or if activations are unknown.

    The search uses allocated bytes, which is cheap, and then, unless `quick`, the allocator's model.
    """
    if capacity_bytes(cluster) is None or not spec.traces:
        return 1

    job = _job(spec, plan=plan, cluster=cluster, optimizer=optimizer, system=system)

    def fits(batch: int, *, quick: bool) -> bool:
        memory = _memory(job, batch=batch, cluster=cluster, quick=quick, system=system, stops=True)
        return _fits(memory, job=job, cluster=cluster) == "yes"

    batch = largest_fitting(lambda batch: fits(batch, quick=True))
    return batch if batch == 1 or quick else _refined(batch, fits=lambda batch: fits(batch, quick=False))


def _refined(most: int, *, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `most` that fits, to a fiftieth: each test runs the allocator's model."""
    if fits(most):
        return most
    low, high = 1, most
    while high - low > max(1, low // 50):
        # The allocator usually adds a tenth, so the answer is likely near the upper end.
        middle = min(high - 1, max(low + 1, high - max(1, (high - low) // 8)))
        if not fits(middle):
            high = middle
            middle = (low + high) // 2
            if middle == low or not fits(middle):
                high = max(middle, low + 1)
                continue
        low = middle
    return low


def candidates(
    spec_for: SpecFor,
    *,
    plan: Plan,
    strategies: Sequence[str],
    cluster: Cluster,
    optimizer: str,
    goal: str,
    quick: bool = False,
    system: System = OWN,
    global_batch: int | None = None,
    recomputes: Sequence[str] = (),
) -> list[Candidate]:
    """Return each strategy at the plan's micro-batch or, by default, at the largest that fits (1 for goal `memory`).

    With a `global_batch` the micro-batch divides the samples of a rank, and the passes follow from it. On several
    nodes each strategy is sharded over all ranks and over the smaller groups of `meshes`. Several passes keep their
    gradients unsharded where that fits, and reduce in each pass where it does not. Of `recomputes` (default: the
    plan's) each takes the best. `system` as for `cost`.
    """
    batches = micro_batches_of(plan, global_batch=global_batch, num_ranks=cluster.num_ranks)

    def at_best_batch(asked: Plan, *, spec: ModelSpec, quick: bool) -> Candidate:
        for chosen in _passes(asked, batches=batches):
            one = _at_best_batch(
                spec, batches, plan=chosen, cluster=cluster, optimizer=optimizer, goal=goal, quick=quick, system=system
            )
            if one.fits != "no":
                break
        return one

    found = []
    for strategy in strategies:
        for mesh, across in _places(strategy, plan=plan, cluster=cluster, optimizer=optimizer):
            placed = replace(plan, strategy=strategy, mesh=mesh, across=across)
            ways = _recomputed(placed, recomputes=recomputes)
            spec = spec_for(*ways)
            # Of a model without traces no activations are known.
            ways = ways if spec.traces else ways[:1]
            found.append(_best_way(ways, partial(at_best_batch, spec=spec), goal=goal, quick=quick))
    return [one for one in found if one.plan.across == plan.across or not _is_worse(one, found)]


def _places(strategy: str, *, plan: Plan, cluster: Cluster, optimizer: str) -> list[tuple[Mesh, str]]:
    """Return meshes, each with the strategy across them: the plan's, and on several nodes the one that shards most."""
    return [
        (mesh, across)
        for mesh in meshes(strategy, plan=plan, cluster=cluster)
        for across in dict.fromkeys(
            (
                plan.across if STRATEGIES[strategy].params.is_sharded else ACROSS[0],
                across_on(mesh, rows=[strategy], base=plan, may_cross=may_cross(optimizer) and not plan.offload_states),
            )
        )
    ]


def _is_worse(one: Candidate, found: Sequence[Candidate]) -> bool:
    """Return whether another mesh of its strategy needs no more memory and is no slower."""
    rest = [other for other in found if other is not one and other.plan.strategy == one.plan.strategy]
    return any(
        other.memory.allocated_bytes <= one.memory.allocated_bytes and other.samples_per_s >= one.samples_per_s
        for other in rest
    )


def _recomputed(plan: Plan, *, recomputes: Sequence[str]) -> list[Plan]:
    """Return the plan with each recompute mode that its engine has; itself without any."""
    found = [replace(plan, recompute=way) for way in recomputes]
    return [one for one in found if LIMITS[plan.engine].why_not_planned(one) is None] or [plan]


def _best_way(ways: Sequence[Plan], costed: Callable[..., Candidate], *, goal: str, quick: bool) -> Candidate:
    """Return the best candidate; the allocator's model runs for plans that may be the best without it."""
    if quick or len(ways) == 1:
        return min((costed(way, quick=quick) for way in ways), key=lambda one: _preference(one, goal=goal))
    bounds = [(_preference(costed(way, quick=True), goal=goal), way) for way in ways]
    best: Candidate | None = None
    for bound, way in sorted(bounds, key=lambda pair: pair[0]):
        if best is not None and _preference(best, goal=goal) <= bound:
            break
        one = costed(way, quick=False)
        if best is None or _preference(one, goal=goal) < _preference(best, goal=goal):
            best = one
    assert best is not None
    return best


def _preference(one: Candidate, *, goal: str) -> tuple[int, float]:
    """Return the order among plans that differ in what they recompute: the fastest that fits, or the smallest."""
    is_by_memory = goal == "memory" or one.fits == "no"
    return _FITS.index(one.fits), one.memory.device_bytes if is_by_memory else -one.samples_per_s


def _passes(plan: Plan, *, batches: MicroBatches) -> list[Plan]:
    """Return the plan and, if it shards gradients and may have several passes, one that reduces them in each pass.

    The second one needs less memory and sends more: it is taken where the first one does not fit.
    """
    has_passes = batches.passes > 1 or batches.samples is not None
    has_its_way = plan.accumulate_reduced or plan.updates_in_backward
    if has_its_way or not has_passes or not STRATEGIES[plan.strategy].grads.is_sharded:
        return [plan]
    return [plan, replace(plan, accumulate_reduced=True)]


def _at_best_batch(
    spec: ModelSpec, batches: MicroBatches, *, plan: Plan, cluster: Cluster, optimizer: str, goal: str, quick: bool,
    system: System,
) -> Candidate:  # fmt: skip
    """Return the plan at its micro-batch or, if that is free, at the largest that fits (1 for goal `memory`)."""
    batch = batches.micro_batch or 1
    if batches.samples is not None:
        batch = _largest_divisor(
            spec,
            batches,
            plan=plan,
            cluster=cluster,
            optimizer=optimizer,
            quick=quick or goal == "memory",
            system=system,
        )
    elif batches.is_free and goal == "throughput":
        batch = largest_batch(spec, plan=plan, cluster=cluster, optimizer=optimizer, quick=quick, system=system)
    passes = batches.accumulate(batch)
    sized = replace(
        plan, micro_batch=batch, accumulate=passes, accumulate_reduced=plan.accumulate_reduced and passes > 1
    )
    return cost(spec, plan=sized, cluster=cluster, optimizer=optimizer, quick=quick, system=system)


def _largest_divisor(
    spec: ModelSpec, batches: MicroBatches, *, plan: Plan, cluster: Cluster, optimizer: str, quick: bool, system: System
) -> int:
    """Return the largest micro-batch that divides a rank's samples and fits, or else the smallest."""
    for batch in reversed(batches.allowed()):
        chosen = replace(plan, accumulate=batches.accumulate(batch))
        job = _job(spec, plan=chosen, cluster=cluster, optimizer=optimizer, system=system)
        # If its tensors alone do not fit, the allocator's model need not be run.
        looks = (True,) if quick else (True, False)
        peaks = (_memory(job, batch=batch, cluster=cluster, quick=look, system=system, stops=True) for look in looks)
        if all(_fits(peak, job=job, cluster=cluster) in ("yes", "unknown") for peak in peaks):
            return batch
    return batches.allowed()[0]
