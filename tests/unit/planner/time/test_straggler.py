"""A step waits for the slowest node: longer with more nodes, and longer where units are gathered over them."""

from dataclasses import replace
from itertools import pairwise

import pytest
from planned_specs import spec_for

from shardwise.hardware import cluster_of
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh
from shardwise.planner.time.collective import expected_maximum, most_pauses
from shardwise.planner.time.step_time import TimeEstimate, estimate_time

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


@pytest.mark.parametrize("mean", [0.01, 1.0, 29.9, 30.1, 500.0])
def test_the_most_pauses_lie_between_the_mean_and_the_sum(mean: float) -> None:
    """Few pauses of many nodes add up, since no two come in one step; many pauses hardly exceed their mean."""
    assert most_pauses(1, mean) == mean
    assert mean < most_pauses(4, mean) < most_pauses(64, mean) < 64 * mean
    assert most_pauses(64, 1e-6) == pytest.approx(64e-6, rel=1e-3)
    assert most_pauses(16, 30.1) == pytest.approx(most_pauses(16, 29.9), rel=0.05)


def test_one_node_waits_for_none() -> None:
    assert timed(FSDP, nodes=1).straggler_seconds == pytest.approx(0.0, abs=1e-12)


def test_the_wait_grows_with_the_nodes_and_is_part_of_the_step() -> None:
    found = [timed(FSDP, nodes=nodes) for nodes in (2, 4, 16, 64)]
    for fewer, more in pairwise(found):
        assert more.straggler_seconds > fewer.straggler_seconds
        assert more.step_seconds > fewer.step_seconds
    assert 0.05 < found[-1].straggler_seconds / found[-1].step_seconds < 0.15


def test_sharding_within_a_node_waits_less_than_sharding_over_all() -> None:
    """Over all nodes every pause counts; within nodes only those of the node that paused the most in a step."""
    long = replace(FSDP, accumulate=32)
    whole, within = timed(long, nodes=64), timed(replace(long, mesh=Mesh(replicate=64, shard=8)), nodes=64)
    assert within.straggler_seconds / within.step_seconds < 0.6 * whole.straggler_seconds / whole.step_seconds


def test_the_most_pauses_of_thousands_of_groups_are_found_for_every_mean() -> None:
    """Where probabilities add up to a little less than 1, too."""
    found = [most_pauses(16_384, number / 50) for number in range(1, 1_500)]
    assert found == sorted(found)
    assert all(most > number / 50 for number, most in enumerate(found, start=1))
