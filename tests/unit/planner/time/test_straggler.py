"""A step waits for the slowest node: longer with more nodes, and longer where units are gathered over them."""

from dataclasses import replace
from itertools import pairwise

import pytest
from planned_specs import spec_for

from shardwise.hardware import cluster_of
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.planner.time.step_time import TimeEstimate, estimate_time
from shardwise.planner.time.straggler import expected_maximum

FSDP = Plan(precision="bf16", recompute="full", micro_batch=4)
SPEC = spec_for("gpt2-1.5b", FSDP)


def timed(plan: Plan, *, nodes: int) -> TimeEstimate:
    cluster = cluster_of(f"{nodes}x8xh100-80gb" if nodes > 1 else "8xh100-80gb")
    found = estimate_time(SPEC, plan=plan, cluster=cluster)
    assert found is not None
    return found


@pytest.mark.parametrize(("count", "expected"), [(1, 0.0), (4, 1.029), (16, 1.766), (256, 2.827)])
def test_the_largest_of_n_normals(count: int, expected: float) -> None:
    assert expected_maximum(count) == pytest.approx(expected, rel=0.02)


def test_one_node_waits_for_none() -> None:
    assert timed(FSDP, nodes=1).straggler_seconds == 0.0


def test_the_wait_grows_with_the_nodes_and_is_part_of_the_step() -> None:
    found = [timed(FSDP, nodes=nodes) for nodes in (1, 2, 8, 64)]
    for fewer, more in pairwise(found):
        assert more.straggler_seconds > fewer.straggler_seconds
        assert more.step_seconds > fewer.step_seconds
    assert 0.05 < found[-1].straggler_seconds / found[-1].step_seconds < 0.15


def test_sharding_within_a_node_waits_less_than_sharding_over_all() -> None:
    hybrid = replace(FSDP, mesh=Mesh(replicate=64, shard=8))
    whole, within = timed(FSDP, nodes=64), timed(hybrid, nodes=64)
    assert within.straggler_seconds / within.step_seconds < 0.6 * whole.straggler_seconds / whole.step_seconds
