"""The bytes that a rank sends in a step: the planner's total, and the report's numbers by kind of operation."""

from collections.abc import Callable, Mapping

from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Placement
from shardwise.planner.job import Job
from shardwise.planner.sizes import sizes_of
from shardwise.program import Kind, Operation, Row, StepProgram
from shardwise.program.operations import ON_BUCKETS
from shardwise.program.run import run_in_order


def sent_by_kind(
    program: StepProgram,
    *,
    placements: Mapping[str, Placement],
    mesh: Mesh,
    num_bytes: Callable[[Operation], float] = lambda operation: operation.num_bytes,
) -> dict[Kind, float]:
    """Return the bytes that one rank sends for each kind of operation, with collectives that send no byte twice.

    n ranks gather or reduce-scatter B bytes by sending B·(n−1)/n each, and all-reduce them by sending twice that. To
    and from owners each rank sends only parts of its own slices: B·(n−1)/n². Flags and broadcasts are not counted.
    """
    scattered = {bucket.name for bucket in program.buckets if placements[bucket.units[0]].grads.is_sharded}
    sent: dict[Kind, float] = {}

    def send(operation: Operation, row: Row) -> None:
        match operation.kind:
            case Kind.GATHER:
                ring, rounds = mesh.shard, 1.0
            case Kind.REDUCE:
                ring, rounds = (mesh.shard, 1.0) if operation.subject in scattered else (mesh.num_ranks, 2.0)
            case Kind.REDUCE_SLICE:
                ring, rounds = mesh.replicate, 2.0
            case Kind.TO_OWNERS | Kind.FROM_OWNERS:
                ring, rounds = mesh.shard, 1 / mesh.shard
            case _:
                return
        share = rounds * num_bytes(operation) * (ring - 1) / ring
        sent[operation.kind] = sent.get(operation.kind, 0.0) + share

    run_in_order(program, send)
    return sent


def sent_bytes(job: Job) -> int:
    """Return the bytes that one rank sends in a step, over all its passes."""
    assert job.plan.mesh is not None
    mesh, weights = job.plan.mesh, job.short.weights
    buckets = {bucket.name: bucket for bucket in job.program.buckets}
    sizes = sizes_of(job.spec, plan=job.plan)

    def unfolded(operation: Operation) -> float:
        # One unit of a folded model stands for several.
        if operation.kind not in ON_BUCKETS:
            return weights.get(operation.subject, 1) * operation.num_bytes
        bucket = buckets[operation.subject]
        whole = sum(weights.get(unit, 1) * sizes[unit].reduce_bytes for unit in bucket.units) / bucket.num_pieces
        return whole / mesh.shard if operation.kind is Kind.REDUCE_SLICE else whole

    sent = sent_by_kind(job.program, placements=job.placements, mesh=mesh, num_bytes=unfolded)
    owned, gathered, reduced = (
        sum(sent.get(kind, 0.0) for kind in kinds)
        for kinds in ((Kind.TO_OWNERS, Kind.FROM_OWNERS), (Kind.GATHER,), (Kind.REDUCE, Kind.REDUCE_SLICE))
    )
    passes = job.plan.accumulate
    return round(owned + passes * gathered + (passes if job.plan.accumulate_reduced else 1) * reduced)
