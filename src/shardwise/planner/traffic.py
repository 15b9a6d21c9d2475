"""The bytes that a rank sends in a step: the planner's total, and the report's numbers by kind of operation."""

from collections.abc import Callable, Mapping

from shardwise.plan.placement import Mesh, Placement
from shardwise.planner.job import Job
from shardwise.planner.whole_matrices import sizes_of
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
    grads = {bucket.name: placements[bucket.units[0]].grads for bucket in program.buckets}
    scattered = {name for name, where in grads.items() if where.is_sharded}
    twice = {name for name, where in grads.items() if where.is_sharded_across}
    sent: dict[Kind, float] = {}

    def send(operation: Operation, row: Row) -> None:
        match operation.kind:
            case Kind.GATHER:
                ring, rounds = mesh.shard, 1.0
            case Kind.REDUCE:
                ring, rounds = (mesh.shard, 1.0) if operation.subject in scattered else (mesh.num_ranks, 2.0)
            case Kind.REDUCE_SLICE:
                ring, rounds = mesh.replicate, 1.0 if operation.subject in twice else 2.0
            case Kind.GATHER_SLICE:
                ring, rounds = mesh.replicate, 1.0
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
        """Return the bytes of an operation in all passes; one unit of a folded model stands for several."""
        kind, passes = operation.kind, job.plan.accumulate
        if kind not in ON_BUCKETS:
            times = passes if kind is Kind.GATHER else 1
            return times * weights.get(operation.subject, 1) * operation.num_bytes
        bucket = buckets[operation.subject]
        whole = sum(weights.get(unit, 1) * sizes[unit].reduce_bytes for unit in bucket.units) / bucket.num_pieces
        keeps_slices = job.placements[bucket.units[0]].optim.is_sharded_across
        in_each = job.plan.accumulate_reduced or (keeps_slices and kind is Kind.REDUCE)
        return (passes if in_each else 1) * (whole / mesh.shard if kind is Kind.REDUCE_SLICE else whole)

    return round(sum(sent_by_kind(job.program, placements=job.placements, mesh=mesh, num_bytes=unfolded).values()))
