"""Finds the mistakes that the planner shows, given a model and a cluster."""

from collections.abc import Iterator
from dataclasses import replace

from shardwise.base.vocabulary.quantities import bytes_text
from shardwise.doors.interchange.foreign_setup import ForeignSetup
from shardwise.doors.interchange.mistakes import Mistake
from shardwise.hardware import Cluster
from shardwise.plan import Plan
from shardwise.plan.placement import ACROSS, placement_of
from shardwise.planner.search.candidates import Candidate, SpecFor, cost
from shardwise.planner.systems import system_of

# A step is host-bound if issuing it takes more than this share of its time.
_HOST_BOUND = 0.9
# Replicas are recommended if they are faster by this factor.
_FASTER = 1.05


def predict(
    setup: ForeignSetup, spec_for: SpecFor, *, cluster: Cluster, micro_batch: int | None
) -> tuple[Candidate, list[Mistake]]:
    """Return the cost of the setup on the cluster, and the mistakes that it shows."""
    plan = setup.planned
    if micro_batch is not None or plan.micro_batch is None:
        plan = replace(plan, micro_batch=micro_batch or 1)
    found = cost(spec_for(plan), plan=plan, cluster=cluster, optimizer="adamw", system=system_of(setup.foreign))
    return found, list(_findings(found, spec_for))


def _findings(found: Candidate, spec_for: SpecFor) -> Iterator[Mistake]:
    plan, cluster = found.plan, found.cluster
    capacity = found.capacity_bytes
    if found.fits == "no" and capacity is not None:
        needed = bytes_text(found.memory.device_bytes)
        line = f"{found.batch} samples per rank need {needed} of {bytes_text(capacity)}"
        yield Mistake(code="SW104", line=line, fix=_what_fits(found, spec_for))
        return
    if placement_of(plan.strategy).optim.is_sharded:
        replicas = _cost(
            replace(plan, strategy="ddp", mesh=None, across=ACROSS[0], units="auto", offload_states=False),
            found,
            spec_for,
        )
        ratio = _speed(replicas) / max(_speed(found), 1e-12)
        if replicas.fits == "yes" and ratio > _FASTER:
            yield Mistake(
                code="SW105",
                line=f"DDP needs {bytes_text(replicas.memory.device_bytes)} and is {ratio:.2f} × as fast",
                fix="use DDP, until the model or the batch grows",
            )
    if plan.offload_states:
        kept = _cost(replace(plan, offload_states=False), found, spec_for)
        if kept.fits == "yes":
            yield Mistake(
                code="SW111",
                line=f"without offload it needs {bytes_text(kept.memory.device_bytes)} and fits",
                fix="keep states on the device: moving them over PCIe takes longer than the step",
            )
    if found.time is not None and cluster.device.name != "cpu":
        share = found.time.cpu_seconds / found.time.step_seconds
        if share > _HOST_BOUND:
            yield Mistake(
                code="SW109",
                line=f"issuing the step takes the CPU {share:.0%} of its time, so the GPU waits",
                fix="use a larger micro-batch, compile the model, or run units as CUDA graphs (shardwise's default)",
            )


def _what_fits(found: Candidate, spec_for: SpecFor) -> str:
    """Return the largest batch that fits, or another change with which it fits."""
    plan, batch = found.plan, found.batch
    while batch > 1:
        batch //= 2
        if _cost(replace(plan, micro_batch=batch), found, spec_for).fits == "yes":
            return f"a micro-batch of {batch} would fit"
    tries = {
        "recomputing activations makes it fit": replace(plan, recompute="full"),
        "fsdp makes it fit": replace(plan, strategy="fsdp", micro_batch=1),
        "fsdp with recomputed activations makes it fit": replace(
            plan, strategy="fsdp", recompute="full", micro_batch=1
        ),
    }
    for words, other in tries.items():
        if _cost(other, found, spec_for).fits == "yes":
            return words
    return "use more devices, or larger ones: shardwise plan shows what each strategy needs"


def _cost(plan: Plan, found: Candidate, spec_for: SpecFor) -> Candidate:
    return cost(spec_for(plan), plan=plan, cluster=found.cluster, optimizer="adamw", system=found.system)


def _speed(found: Candidate) -> float:
    return found.time.samples_per_s if found.time is not None else 0.0
