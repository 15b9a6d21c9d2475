"""`estimate`: the memory that a plan needs on one rank, without a device."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from operator import attrgetter

from shardwise.errors import InvalidPlan
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.planner.engine_model import engine_model_of
from shardwise.planner.fold import shorten
from shardwise.planner.job import Job
from shardwise.planner.memory.constants import (
    DEFAULT_COMMUNICATOR_BYTES,
    DEFAULT_CONTEXT_BYTES,
    FIRST_COMMUNICATOR_BYTES,
    KERNEL_BYTES,
    RULES,
)
from shardwise.planner.memory.replay import Replayed
from shardwise.planner.memory.reserved import Reserved, reserve
from shardwise.planner.memory.states import optimizer_of
from shardwise.planner.memory.stream_peak import StreamPeak
from shardwise.planner.ways import traced_ways
from shardwise.planner.whole_matrices import with_owners
from shardwise.spec import ModelSpec
from shardwise.spec.step import COMPILED, StepTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on one rank at the highest point of a step.

    allocated  live tensors; `breakdown_bytes` adds up to it
    reserved   what the caching allocator holds for them
    device     that, the context and the communicators
    """

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    breakdown_bytes: Mapping[str, int]
    peak_at: str
    at_rest_bytes: int
    timeline: tuple[tuple[str, int], ...]
    activations_known: bool = True


def estimate(
    spec: ModelSpec,
    *,
    plan: Plan,
    num_ranks: int,
    batch: int,
    optimizer: str = "adamw-fused",
    device: str = "cuda",
    context_bytes: int | None = None,
    communicator_bytes: int | None = None,
    limit_bytes: int | None = None,
    made_on_device: bool = False,
    quick: bool = False,
) -> MemoryEstimate:
    """The memory of a step of `plan` on one of `num_ranks` ranks, with `batch` samples per rank and pass.

    `limit_bytes`: the device has no more, so the allocator gives back what it holds for nothing before it goes beyond;
    not for captured steps.
    `made_on_device`: the model was, before it was prepared, and not on the meta device or the host; steps use what that
    leaves reserved. With `quick`, the caching allocator is not run, what is reserved is taken to be what is allocated,
    and there is no timeline. Captured steps share their memory with the ordinary ones before them, whose peak it is.
    """
    if batch < 1:
        raise InvalidPlan(f"micro_batch = {batch}: must be a whole number of at least 1")
    job, replayed = _replayed(spec, plan=plan, num_ranks=num_ranks, optimizer=optimizer, device=device)
    peak = replayed.peak(batch)
    breakdown = peak.breakdown(batch)
    outside = _outside(job, device=device, context=context_bytes, communicator=communicator_bytes)
    reserved = 0
    if not quick and device != "cpu":
        # While steps are captured, the allocator cannot give back what it holds.
        left = None if limit_bytes is None or plan.captures else limit_bytes - outside
        found = _reserved(job, batch, left, made_on_device)
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
        at_rest_bytes=sum(line.at(batch) for line in replayed.at_rest),
        timeline=() if quick else tuple((label, line.at(batch)) for label, line in replayed.timeline),
        activations_known=bool(spec.traces),
    )


def job_of(spec: ModelSpec, *, plan: Plan, num_ranks: int, optimizer: str, device: str) -> Job:
    """The job of a plan, whatever its batch; the same one each time."""
    return _replayed(spec, plan=plan, num_ranks=num_ranks, optimizer=optimizer, device=device)[0]


def _outside(job: Job, *, device: str, context: int | None, communicator: int | None) -> int:
    """What a process holds outside the allocator."""
    if device == "cpu":
        return 0
    each = DEFAULT_COMMUNICATOR_BYTES if communicator is None else communicator
    first = FIRST_COMMUNICATOR_BYTES if communicator != 0 else 0
    more = (job.num_communicators - 1) * each
    return (DEFAULT_CONTEXT_BYTES if context is None else context) + KERNEL_BYTES + first + more


def computes_in(spec: ModelSpec, *, plan: Plan) -> str:
    """The way of computing whose trace a plan needs."""
    if plan.precision == "native":
        dtypes = {param.dtype for unit in spec.units for param in unit.params}
        return {frozenset({"float32"}): "fp32", frozenset({"bfloat16"}): "bf16"}.get(frozenset(dtypes), "native")
    if plan.precision == "fp32":
        return "fp32"
    return "autocast" if engine_model_of(plan).autocasts else "bf16"


Prepared = tuple[Job, Replayed]

_structure = attrgetter(*(item.name for item in fields(Plan) if item.name != "micro_batch"))


@lru_cache(maxsize=16)
def _prepared(spec: ModelSpec, optimizer: str, device: str) -> dict[object, Prepared]:
    """Plans that were replayed before, by all of them but the batch."""
    return {}


def _replayed(spec: ModelSpec, *, plan: Plan, num_ranks: int, optimizer: str, device: str) -> Prepared:
    """All that does not depend on the batch, so that a search over batches costs nothing."""
    known = _prepared(spec, optimizer, device)
    key = (_structure(plan), num_ranks)
    if key not in known:
        mesh = plan.mesh or Mesh(shard=num_ranks)
        mesh.check_ranks(num_ranks)
        whole = with_owners(spec, plan=replace(plan, micro_batch=None, mesh=mesh), optimizer=optimizer_of(optimizer))
        known[key] = _replay(spec, plan=whole, optimizer=optimizer, device=device)
    return known[key]


def _replay(spec: ModelSpec, *, plan: Plan, optimizer: str, device: str) -> Prepared:
    traces = _traces(spec, plan=plan)
    short = shorten(spec, plan=plan, runs=traces["none"].runs if traces else ())
    job = Job(
        spec=spec,
        plan=plan,
        short=short,
        traces=traces,
        optimizer=optimizer_of(optimizer),
        rules=RULES[device],
        known_peaks=_known_peaks(spec, device, engine_model_of(plan).grads_leave_at_once),
    )
    return job, job.replay()


@lru_cache(maxsize=64)
def _known_peaks(spec: ModelSpec, device: str, grads_leave_at_once: bool) -> dict[int, StreamPeak]:
    """What jobs whose streams run alike have found out of them."""
    return {}


@lru_cache(maxsize=4096)
def _reserved(job: Job, batch: int, limit_bytes: int | None, made_on_device: bool) -> Reserved:
    return reserve(job, batch=batch, limit_bytes=limit_bytes, made_on_device=made_on_device)


def _traces(spec: ModelSpec, *, plan: Plan) -> dict[str, StepTrace]:
    """A trace for each way in which units of the plan run, and for `none`, which the root uses."""
    if not spec.traces:
        return {}
    way = computes_in(spec, plan=plan)
    found = {}
    for recompute in traced_ways(spec, plan=plan):
        trace = spec.trace(computes_in=way, recompute=recompute)
        if trace is None and recompute in COMPILED.values():
            # A spec of before: compiled units count as what they are uncompiled.
            continue
        if trace is None:
            raise InvalidPlan(f"{spec.name} was not traced in {way} with recompute = {recompute!r}")
        found[recompute] = trace
    return found
