"""The bytes that a rank sends in a step."""

from shardwise.plan.placement import SHARDED
from shardwise.planner.job import Job
from shardwise.planner.sizes import sizes_of
from shardwise.program import Kind


def sent_bytes(job: Job) -> int:
    """What one rank sends, with collectives that send no byte twice.

    n ranks gather or reduce-scatter B bytes by sending B·(n−1)/n each, and all-reduce them by sending twice that. What
    a slice sends over a second axis is counted with its bucket.
    """
    assert job.plan.mesh is not None
    mesh, weights = job.plan.mesh, job.short.weights
    members = {bucket.name: bucket.units for bucket in job.program.buckets}
    slices, copies, num_ranks = mesh.shard, mesh.replicate, mesh.num_ranks
    sizes = sizes_of(job.spec, plan=job.plan)
    gathered = reduced = owned = 0.0
    for operation in job.program.operations():
        if operation.kind is Kind.GATHER:
            gathered += weights.get(operation.subject, 1) * operation.num_bytes * (slices - 1) / slices
        elif operation.kind in (Kind.TO_OWNERS, Kind.FROM_OWNERS):
            owned += weights.get(operation.subject, 1) * operation.num_bytes * (slices - 1) / slices**2
        elif operation.kind is Kind.REDUCE:
            units = members[operation.subject]
            num_bytes = sum(weights.get(unit, 1) * sizes[unit].reduce_bytes for unit in units)
            if job.placements[units[0]].grads is SHARDED:
                reduced += num_bytes * (slices - 1) / slices + 2 * num_bytes / slices * (copies - 1) / copies
            else:
                reduced += 2 * num_bytes * (num_ranks - 1) / num_ranks
    passes = job.plan.accumulate
    return round(owned + passes * gathered + (passes if job.plan.accumulate_reduced else 1) * reduced)
