"""The same training on more and more devices."""

import pytest

from shardwise.base.errors import InvalidCluster
from shardwise.hardware import cluster_of
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.planner.search.candidates import candidates
from shardwise.planner.search.scale import SIZES, Scaled, scaling

PLAN = Plan(precision="bf16", micro_batch=2)


def scaled(cluster: str, *, strategies: tuple[str, ...] = ("ddp", "fsdp"), plan: Plan = PLAN) -> list[Scaled]:
    source, where = Model("gpt2-1.5b"), cluster_of(cluster)
    found = candidates(
        source.spec_for,
        plan=plan,
        strategies=strategies,
        cluster=where,
        optimizer="adamw",
        goal="throughput",
        quick=True,
    )
    return scaling(source.spec_for, plan=plan, found=found, cluster=where, optimizer="adamw")


def test_every_size_has_its_best_plan_on_nodes_of_the_cluster() -> None:
    rows = scaled("8xh100-80gb")
    assert [row.num_ranks for row in rows] == list(SIZES)
    for row in rows:
        assert row.candidate.cluster.devices_per_node == 8
        assert row.candidate.plan.mesh is not None
        assert row.candidate.plan.mesh.num_ranks == row.num_ranks
        assert row.candidate.batch == 2


def test_slow_links_cost_efficiency() -> None:
    fast, slow = scaled("2x8xh100-80gb@ib-8x400"), scaled("2x8xh100-80gb@eth-25")
    assert fast[0].efficiency == slow[0].efficiency == 1
    assert slow[-1].efficiency < 0.5 * fast[-1].efficiency


def test_sizes_that_nothing_fits_on_are_left_out() -> None:
    rows = scaled("2x8xv100-16gb@ib-100", strategies=("ddp",))
    assert rows == []


def test_without_a_fabric_there_is_one_line() -> None:
    with pytest.raises(InvalidCluster, match="what links nodes of rtx-4090 is not known"):
        scaled("8xrtx-4090")
