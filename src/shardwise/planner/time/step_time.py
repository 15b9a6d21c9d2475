"""`estimate_time`: predicts the time of a step of a plan on a cluster, without running it."""

import math
from dataclasses import dataclass
from functools import lru_cache

from shardwise.base.vocabulary.span import Span
from shardwise.hardware import Cluster
from shardwise.hardware.borrowed import host_factor
from shardwise.plan import Plan
from shardwise.planner.engine_model import HOST_SLOWDOWN, SLOWDOWN, UNIT_GRAPH_SECONDS
from shardwise.planner.job import Job
from shardwise.planner.memory.peak import job_of
from shardwise.planner.systems import OWN, System
from shardwise.planner.time.collective import Rings, can_link, rings_of, straggler_seconds
from shardwise.planner.time.compute import can_time
from shardwise.planner.time.host_link import host_bytes_per_s
from shardwise.planner.time.pieces import Pieces, Schedule, schedule_of, timed_pieces
from shardwise.planner.time.queues import Queues, WorkSeconds
from shardwise.program.spec import ModelSpec
from shardwise.program.spec.step import IN_UNIT

_FAR_AHEAD = 1e6
MOST_ISSUED = 1024
"""Kernels that a CPU can issue while the device waits; the next launch then waits too. Of 512, 1024 and 2048 it fits
the rows of benchmarks/results/host_memory_h200.json best."""

STEPS_UNTIL_STEADY = 3
"""Steps after which each is like the one before it, where the CPU's lead is limited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """A step in the middle of training.

    step_seconds              from the end of a step to the end of the next
    samples_per_s             of all ranks together
    tokens_per_s_per_gpu      of one rank; None if samples have no length
    mfu                       operations of forward and backward without recomputation, as a share of the device's peak
    exposed_comm_seconds      idle time of the device because of communication
    comm_seconds              time in which the wire is busy
    cpu_seconds               time that the CPU needs to issue the step
    straggler_seconds         wait for the slowest node
    """

    step_seconds: float
    samples_per_s: float
    tokens_per_s_per_gpu: float | None
    mfu: float | None
    exposed_comm_seconds: float
    comm_seconds: float
    cpu_seconds: float
    straggler_seconds: float


def why_not_timed(spec: ModelSpec, *, plan: Plan, cluster: Cluster) -> str | None:
    """Return why there is no prediction of time; None if there is one."""
    if not spec.traces:
        return "nothing is known of the model but its parameters"
    if plan.dynamic:
        return "what a dynamic order of units costs is not modelled"
    if (plan.offload_activations or plan.offload_states) and cluster.device.host_link is None:
        return f"what links {cluster.device.name} to host memory is not known"
    if not can_time(cluster.device):
        return f"calibrate this device: shardwise calibrate ({cluster.device.name} has no speeds)"
    if not can_link(cluster):
        return f"what links the devices of a node is not known of {cluster.device.name}"
    return None


def job_on(
    spec: ModelSpec,
    *,
    plan: Plan,
    cluster: Cluster,
    optimizer: str,
    is_wrapped: bool = True,
    as_graphs: bool = False,
) -> Job:
    """Return the job of a plan on all devices of a cluster."""
    return job_of(
        spec,
        plan=plan,
        num_ranks=cluster.num_ranks,
        optimizer=optimizer,
        device=cluster.device.torch_type,
        is_wrapped=is_wrapped,
        as_graphs=as_graphs,
    )


def estimate_time(
    spec: ModelSpec,
    *,
    plan: Plan,
    cluster: Cluster,
    optimizer: str = "adamw",
    clips: bool = False,
    as_graphs: bool = False,
) -> TimeEstimate | None:
    """Return the time of a step of `plan`, whose micro-batch is set: `time_job` for a single question."""
    assert plan.micro_batch is not None
    job = job_on(spec, plan=plan, cluster=cluster, optimizer=optimizer, as_graphs=as_graphs)
    return time_job(job, batch=plan.micro_batch, cluster=cluster, clips=clips)


def time_job(
    job: Job, *, batch: int, cluster: Cluster, clips: bool = False, system: System = OWN
) -> TimeEstimate | None:
    """Return the time of a step; None where `why_not_timed` gives a reason.

    `clips`: the step also clips the gradients by their norm.
    `system`: the one that runs the strategy, if it adds something to what the plan's engine does.
    """
    spec, plan = job.spec, job.plan
    if why_not_timed(spec, plan=plan, cluster=cluster) is not None:
        return None
    prepared = _prepare(job, cluster=cluster, clips=clips, overlap=system.overlap)
    queues, alone, cpu_seconds = _steady(prepared, batch=batch)
    alone += sum(len(unit.params) for unit in spec.units) * system.tensor_seconds.get(plan.strategy, 0.0)
    waited = straggler_seconds(alone, rings=prepared.rings, cluster=cluster, gathers=prepared.job.gathers)
    step_seconds = alone + waited
    samples = batch * plan.accumulate
    return TimeEstimate(
        step_seconds=step_seconds,
        samples_per_s=samples * cluster.num_ranks / step_seconds,
        tokens_per_s_per_gpu=samples * spec.seq / step_seconds if spec.seq is not None else None,
        mfu=_mfu(prepared, samples=samples, step_seconds=step_seconds),
        exposed_comm_seconds=queues.exposed,
        comm_seconds=queues.sent,
        cpu_seconds=cpu_seconds,
        straggler_seconds=waited,
    )


def timeline(
    spec: ModelSpec,
    *,
    plan: Plan,
    cluster: Cluster,
    optimizer: str = "adamw",
    clips: bool = False,
    as_graphs: bool = False,
) -> list[Span]:
    """Return the spans of each queue in one step, from its beginning."""
    assert plan.micro_batch is not None
    job = job_on(spec, plan=plan, cluster=cluster, optimizer=optimizer, as_graphs=as_graphs)
    prepared = _prepare(job, cluster=cluster, clips=clips, shortened=False)
    queues, _, _ = _steady(prepared, batch=plan.micro_batch, records=True)
    assert queues.spans is not None
    start = min((span.start for span in queues.spans), default=0.0)
    return [span._replace(start=span.start - start, end=span.end - start) for span in queues.spans]


def block_seconds(spec: ModelSpec, *, plan: Plan, cluster: Cluster, num_steps: int, optimizer: str = "adamw") -> float:
    """Return the mean of steps after a pause, as benchmarks measure them: in the first the CPU is not yet ahead."""
    assert plan.micro_batch is not None
    prepared = _prepare(job_on(spec, plan=plan, cluster=cluster, optimizer=optimizer), cluster=cluster)
    queues = _queues(prepared, _works(prepared, batch=plan.micro_batch), cpu=0.0)
    _, step_seconds, _ = _steady(prepared, batch=plan.micro_batch)
    return (max(queues.compute, queues.cpu) + (num_steps - 1) * step_seconds) / num_steps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Prepared:
    """Everything that does not depend on the batch."""

    job: Job
    cluster: Cluster
    schedule: Schedule
    pieces: Pieces
    rings: Rings


@lru_cache(maxsize=4096)
def _known(job: Job) -> dict[tuple[int, bool, bool, str], _Prepared]:
    """Return the cache of a job, by the id of the cluster, which is slow to hash; the values refer to it."""
    return {}


def _prepare(
    job: Job, *, cluster: Cluster, clips: bool = False, shortened: bool = True, overlap: str = "all"
) -> _Prepared:
    known, key = _known(job), (id(cluster), clips, shortened, overlap)
    if key not in known:
        job = timed_job(job) if shortened else job.unshortened
        known[key] = _Prepared(
            job=job,
            cluster=cluster,
            schedule=schedule_of(job, cluster=cluster, clips=clips, overlap=overlap),
            pieces=timed_pieces(job, device=cluster.device),
            rings=rings_of(job.mesh, cluster=cluster),
        )
    return known[key]


def timed_job(job: Job) -> Job:
    """Return the job whose step is timed: the shortened one only if each of its units is reduced by itself.

    Otherwise a unit does not do the same as the one before it, and cannot stand for others. Nor can one that waits for
    its slice early in forward: later ones find theirs.
    """
    together = any(len(bucket.units) > 1 for bucket in job.program.buckets)
    returns = any(placement.optim.is_sharded_across for placement in job.placements.values())
    differ = together or returns or job.plan.offload_states or job.plan.updates_in_backward
    return job.unshortened if differ else job


def _works(prepared: _Prepared, *, batch: int) -> list[WorkSeconds]:
    pieces, job = prepared.pieces.works(batch), prepared.job
    if job.as_graphs:
        keys = [(trigger, unit) for (trigger, unit, _), stream in job.streams if stream.ops]
        launch = UNIT_GRAPH_SECONDS * host_factor(prepared.cluster.device)
        pieces = [
            WorkSeconds(launch, piece.kernel, launch + piece.kernel)
            if unit in job.graph_units and trigger in IN_UNIT
            else piece
            for (trigger, unit), piece in zip(keys, pieces, strict=True)
        ]
    saved = [line.at(batch) / host_bytes_per_s(prepared.cluster) for line in job.saved_on_host.values()]
    return [*pieces, *prepared.schedule.works, *(WorkSeconds(0.0, seconds, seconds) for seconds in saved)]


def _steady(prepared: _Prepared, *, batch: int, records: bool = False) -> tuple[Queues, float, float]:
    """Return (queues, seconds, CPU seconds) of a step in the middle of training.

    Nothing that the CPU issues waits for the device, so over many steps the CPU gets ahead as far as it can, and a step
    takes as long as the slower of the two: the device with a CPU far ahead, or the CPU. A CPU that updates states
    itself is never ahead. Nor is one that issues single kernels while the device waits for host memory: the CPU's time
    and the waits add up, except for the kernels that fit into the device's queue.
    """
    works, plan = _works(prepared, batch=batch), prepared.job.plan
    waits = bool(plan.offload_states) and plan.offload_update == "host"
    if waits and prepared.cluster.device.torch_type != "cpu":
        queues = _queues(prepared, works, cpu=0.0, records=records)
        seconds = max(queues.cpu, queues.compute)
        return queues, seconds, seconds
    if prepared.cluster.device.torch_type == "cpu":
        queues = _queues(prepared, works, cpu=0.0, records=records)
        return queues, queues.cpu, queues.cpu
    queues = _queues(prepared, works, cpu=-_FAR_AHEAD, records=records)
    device_seconds, cpu_seconds = queues.compute, queues.cpu + _FAR_AHEAD
    lead = _lead(prepared, works)
    if lead < cpu_seconds:
        queues = _queues(prepared, works, cpu=0.0, lead=lead, records=records)
        return queues, queues.compute, cpu_seconds
    if cpu_seconds > device_seconds:
        # Communication is hidden behind the CPU's time too.
        queues = _queues(prepared, works, cpu=0.0, records=records)
    return queues, max(device_seconds, cpu_seconds), cpu_seconds


def _lead(prepared: _Prepared, works: list[WorkSeconds]) -> float:
    """Return the seconds by which the CPU can be ahead of a device that waits for host memory."""
    plan, pieces = prepared.job.plan, prepared.pieces.pieces
    if not (plan.offload_states or plan.offload_activations) or prepared.job.as_graphs:
        return math.inf
    launch = sum(work.launch for work, _ in zip(works, pieces, strict=False))
    return MOST_ISSUED * launch / sum(len(piece.stream.ops) for piece in pieces)


def _queues(
    prepared: _Prepared, works: list[WorkSeconds], *, cpu: float, lead: float = math.inf, records: bool = False
) -> Queues:
    """Run one step from time 0, with what the previous step left on the wire and in the queue of host memory."""
    is_host = prepared.cluster.device.torch_type == "cpu"
    queues = Queues(slowdown=HOST_SLOWDOWN if is_host else SLOWDOWN, is_host=is_host, cpu=cpu, lead=lead)
    if prepared.schedule.update:
        queues.run(prepared.schedule.update, works)
        queues.restart(cpu=cpu)
    plan, is_limited = prepared.job.plan, lead < math.inf
    leaves_copies = bool(plan.offload_states) and plan.updates_in_backward
    for _ in range(STEPS_UNTIL_STEADY if is_limited else int(leaves_copies)):
        _run_step(queues, schedule=prepared.schedule, works=works, plan=plan)
        queues.restart(cpu=queues.cpu - queues.compute if is_limited else cpu)
    queues.spans = [] if records else None
    _run_step(queues, schedule=prepared.schedule, works=works, plan=plan)
    return queues


def _run_step(queues: Queues, *, schedule: Schedule, works: list[WorkSeconds], plan: Plan) -> None:
    """Run all passes; those between the second and the last take as long as the second."""
    for number in range(min(plan.accumulate - 1, 2)):
        before = queues.now()
        queues.run(schedule.first, works)
        if number == 1:
            queues.skip(before, times=plan.accumulate - 3)
    queues.run(schedule.last, works)


def _mfu(prepared: _Prepared, *, samples: int, step_seconds: float) -> float | None:
    """Return the operations of a step, without recomputation, as a share of the device's peak.

    Backward computes as much as forward for the gradients of activations, and again for those of trained parameters:
    together three times forward, or about twice where adapters are trained on a frozen model.
    """
    peak = prepared.cluster.device.flops_per_s(prepared.job.precision)
    if peak is None:
        return None
    pieces = prepared.pieces
    return (2 + pieces.trained) * pieces.forward_flops.at(samples) / (step_seconds * peak.value)
