"""The bytes that a rank sends in a step."""

from functools import lru_cache

from shardwise.mesh import Mesh
from shardwise.placement import SHARDED
from shardwise.plan import Plan
from shardwise.program import Kind, build
from shardwise.spec import ModelSpec


@lru_cache(maxsize=256)
def _sent(spec: ModelSpec, plan: Plan, num_ranks: int) -> int:
    mesh = plan.mesh or Mesh(shard=num_ranks)
    placements = plan.placements(unit.name for unit in spec.units)
    program = build(spec, plan=plan)
    members = {bucket.name: bucket.units for bucket in program.buckets}
    slices, copies = mesh.shard, mesh.replicate
    total = 0.0
    for operation in program.operations():
        if operation.kind is Kind.GATHER:
            total += operation.num_bytes * (slices - 1) / slices
        elif operation.kind is Kind.REDUCE and placements[members[operation.subject][0]].grads is SHARDED:
            total += operation.num_bytes * (slices - 1) / slices
            total += 2 * operation.num_bytes / slices * (copies - 1) / copies
        elif operation.kind is Kind.REDUCE:
            total += 2 * operation.num_bytes * (num_ranks - 1) / num_ranks
    return round(total * plan.accumulate)


def sent_bytes(spec: ModelSpec, *, plan: Plan, num_ranks: int) -> int:
    """What one rank sends, with collectives that send no byte twice.

    n ranks gather or reduce-scatter B bytes by sending B·(n−1)/n each, and all-reduce them by sending twice that.
    """
    return _sent(spec, plan, num_ranks)
