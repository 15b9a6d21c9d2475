"""`estimate`: predicts the memory of a plan on one rank, without a device."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter

from shardwise.base.errors import InvalidPlan
from shardwise.base.vocabulary.categories import OTHER
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh
from shardwise.planner.engine_model import engine_model_of
from shardwise.planner.fold import shorten
from shardwise.planner.job import Job
from shardwise.planner.memory.constants import (
    DEFAULT_COMMUNICATOR_BYTES,
    DEFAULT_CONTEXT_BYTES,
    FIRST_COMMUNICATOR_BYTES,
    KERNEL_BYTES,
)
from shardwise.planner.memory.reserved import Room, reserve
from shardwise.planner.memory.states import optimizer_of
from shardwise.planner.memory.stream_peak import StreamPeak
from shardwise.planner.ways import fp8_traces, traced_ways
from shardwise.planner.whole_matrices import with_owners
from shardwise.program.spec import ModelSpec
from shardwise.program.spec.step import COMPILED, StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one rank at the highest point of a step.

    allocated  live tensors; the sum of `breakdown_bytes`
    reserved   the segments of the caching allocator
    device     reserved, the context and the communicators
    host       states and activations in host memory, which all ranks of a node share
    """

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    breakdown_bytes: Mapping[str, int]
    peak_at: str
    at_rest_bytes: int
    activations_known: bool = True
    host_bytes: int = 0

    def plus(self, num_bytes: int) -> "MemoryEstimate":
        """Return the same with buffers that are always there."""
        return replace(
            self,
            allocated_bytes=self.allocated_bytes + num_bytes,
            reserved_bytes=self.reserved_bytes + num_bytes,
            device_bytes=self.device_bytes + num_bytes,
            breakdown_bytes={**self.breakdown_bytes, OTHER: self.breakdown_bytes[OTHER] + num_bytes},
            at_rest_bytes=self.at_rest_bytes + num_bytes,
        )


def estimate(
    spec: ModelSpec,
    *,
    plan: Plan,
    num_ranks: int,
    batch: int,
    optimizer: str = "adamw-fused",
    device: str = "cuda",
    communicator_bytes: int | None = None,
    made_on_device: bool = False,
    quick: bool = False,
    as_graphs: bool = False,
) -> MemoryEstimate:
    """Return the memory of a step of `plan` on one of `num_ranks` ranks: `estimate_job` for a single question."""
    job = job_of(spec, plan=plan, num_ranks=num_ranks, optimizer=optimizer, device=device, as_graphs=as_graphs)
    return estimate_job(
        job, batch=batch, communicator_bytes=communicator_bytes, made_on_device=made_on_device, quick=quick
    )


def estimate_job(
    job: Job,
    *,
    batch: int,
    context_bytes: int | None = None,
    communicator_bytes: int | None = None,
    limit_bytes: int | None = None,
    made_on_device: bool = False,
    expands: bool = False,
    quick: bool = False,
    stops: bool = False,
) -> MemoryEstimate:
    """Return the memory of a step on one rank, with `batch` samples per rank per pass.

    limit_bytes      memory of the device: the allocator gives back free segments before it exceeds this
    made_on_device   the model was created on the device before it was prepared, not on the meta device or the host;
                     steps reuse the memory that this left reserved
    expands          the caching allocator has expandable segments
    quick            skip the model of the caching allocator: reserved is taken to be allocated
    stops            where more than the limit is reserved, say no more than that
    """
    if batch < 1:
        raise InvalidPlan(f"micro_batch = {batch}: must be a whole number of at least 1")
    peak = job.replayed.peak(batch)
    breakdown = peak.breakdown(batch)
    outside = _outside(job, context=context_bytes, communicator=communicator_bytes)
    reserved = 0
    if not quick and job.device != "cpu":
        left = None if limit_bytes is None else limit_bytes - outside
        room = Room(limit_bytes=left, made_on_device=made_on_device, expands=expands)
        found = reserve(job, batch=batch, room=room, stops=stops)
        breakdown["other"] += found.slack_bytes
        reserved = found.reserved_bytes
    allocated = sum(breakdown.values())
    reserved = max(reserved, allocated)
    return MemoryEstimate(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        device_bytes=reserved + outside,
        breakdown_bytes=breakdown,
        peak_at=peak.label,
        at_rest_bytes=sum(line.at(batch) for line in job.at_rest),
        activations_known=bool(job.spec.traces),
        host_bytes=job.host_line.at(batch),
    )


def job_of(
    spec: ModelSpec,
    *,
    plan: Plan,
    num_ranks: int,
    optimizer: str,
    device: str,
    is_wrapped: bool = True,
    as_graphs: bool = False,
) -> Job:
    """Return the job of a plan for every batch; plans that differ in nothing but the batch have the same job.

    is_wrapped   False for an ordinary loop on one device, without DDP (plans of torch's engine under ddp)
    as_graphs    with units as CUDA graphs, where the plan allows it
    """
    as_graphs = as_graphs and plan.captures
    known, key = _jobs(spec, optimizer, device), (_without_batch(plan), num_ranks, is_wrapped, as_graphs)
    if key not in known:
        mesh, rule = plan.mesh or Mesh(shard=num_ranks), optimizer_of(optimizer)
        mesh.check_ranks(num_ranks)
        plan = with_owners(spec, plan=replace(plan, micro_batch=None, mesh=mesh), optimizer=rule)
        traces = _traces(spec, plan=plan)
        known[key] = Job(
            spec=spec,
            plan=plan,
            short=shorten(spec, plan=plan, runs=traces["none"].runs if traces else ()),
            traces=traces,
            fp8_traces=_fp8_traces(spec, plan=plan),
            optimizer_name=optimizer,
            device=device,
            is_wrapped=is_wrapped,
            as_graphs=as_graphs,
            known_peaks=_known_peaks(spec, device, engine_model_of(plan).grads_leave_at_once),
        )
    return known[key]


_without_batch = attrgetter(*(item.name for item in fields(Plan) if item.name != "micro_batch"))


@lru_cache(maxsize=16)
def _jobs(spec: ModelSpec, optimizer: str, device: str) -> dict[object, Job]:
    """Return the cache of jobs."""
    return {}


@lru_cache(maxsize=64)
def _known_peaks(spec: ModelSpec, device: str, grads_leave_at_once: bool) -> dict[int, StreamPeak]:
    """Return the cache of stream peaks."""
    return {}


def _outside(job: Job, *, context: int | None, communicator: int | None) -> int:
    """Return the bytes of a process outside the allocator."""
    if job.device == "cpu":
        return 0
    process = (DEFAULT_CONTEXT_BYTES if context is None else context) + KERNEL_BYTES
    if not job.is_wrapped:
        return process
    each = DEFAULT_COMMUNICATOR_BYTES if communicator is None else communicator
    first = FIRST_COMMUNICATOR_BYTES if communicator != 0 else 0
    return process + first + (job.num_communicators - 1) * each


def computes_in(spec: ModelSpec, *, plan: Plan) -> str:
    """Return the way of computing whose trace a plan needs."""
    if plan.precision == "native":
        dtypes = {param.dtype for unit in spec.units for param in unit.params}
        return {frozenset({"float32"}): "fp32", frozenset({"bfloat16"}): "bf16"}.get(frozenset(dtypes), "native")
    if plan.precision == "fp32":
        return "fp32"
    return "autocast" if engine_model_of(plan).autocasts else "bf16"


def _fp8_traces(spec: ModelSpec, *, plan: Plan) -> dict[tuple[str, str], StepTrace]:
    """Return the traces of units that multiply in fp8; where there is none, their memory is taken to be bf16's."""
    found = {(way, how): spec.trace(computes_in=way, recompute=how) for way, how in fp8_traces(spec, plan=plan)}
    return {way: trace for way, trace in found.items() if trace is not None}


def _traces(spec: ModelSpec, *, plan: Plan) -> dict[str, StepTrace]:
    """Return the traces of all ways in which the plan's units run, and `none` for the root."""
    if not spec.traces:
        return {}
    way = computes_in(spec, plan=plan)
    found = {}
    for recompute in traced_ways(spec, plan=plan):
        trace = spec.trace(computes_in=way, recompute=recompute)
        if trace is None and recompute in COMPILED.values():
            # An older spec without it: compiled units are predicted as uncompiled ones.
            continue
        if trace is None:
            raise InvalidPlan(f"{spec.name} was not traced in {way} with recompute = {recompute!r}")
        found[recompute] = trace
    return found
