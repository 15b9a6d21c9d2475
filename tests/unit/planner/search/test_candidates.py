"""The search: the most that fits, the meshes that are tried, and the passes of a step."""

import pytest
from planned_specs import spec_for

from shardwise.hardware import Cluster, cluster_of
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES, Mesh
from shardwise.planner.memory.peak import job_of
from shardwise.planner.search.candidates import _refined, candidates, cost, largest_batch
from shardwise.planner.search.micro_batches import MOST_BATCH, largest_fitting, meshes
from shardwise.planner.traffic import sent_bytes

BF16 = Plan(precision="bf16")
EVERY = list(STRATEGIES)


def on(name: str) -> Cluster:
    return cluster_of(name)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64, 1000, MOST_BATCH])
def test_the_largest_number_that_fits_is_found(most: int) -> None:
    assert largest_fitting(lambda number: number <= most) == most


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("upper", [64, 100])
def test_it_is_found_from_above_too(most: int, upper: int) -> None:
    assert _refined(upper, fits=lambda number: number <= most) == most


def test_no_search_takes_thousands_of_samples() -> None:
    assert largest_fitting(lambda number: True) == MOST_BATCH == 1024


def test_from_far_above_it_is_found_to_a_fiftieth() -> None:
    assert 980 <= _refined(30_000, fits=lambda number: number <= 1000) <= 1000


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_one_sample_more_than_the_largest_batch_does_not_fit(strategy: str) -> None:
    spec, cluster = spec_for("gpt2-1.5b"), on("8xa100-40gb")
    plan = Plan(strategy=strategy, precision="bf16")
    batch = largest_batch(spec, plan=plan, cluster=cluster, optimizer="adamw")
    verdicts = [
        cost(
            spec, plan=Plan(strategy=strategy, precision="bf16", micro_batch=n), cluster=cluster, optimizer="adamw"
        ).fits
        for n in (batch, batch + 1)
    ]
    assert verdicts[0] == "yes"
    assert verdicts[1] != "yes"


def test_for_memorys_sake_a_batch_is_one_sample() -> None:
    found = candidates(
        Model("gpt2-124m").spec_for,
        plan=BF16,
        strategies=EVERY,
        cluster=on("8xh100-80gb"),
        optimizer="adamw",
        goal="memory",
    )
    assert all(candidate.batch == 1 for candidate in found)


def test_on_one_node_there_is_one_mesh() -> None:
    assert meshes("fsdp", plan=BF16, cluster=on("8xh100-80gb")) == [Mesh(shard=8)]


def test_over_nodes_what_is_sharded_is_also_tried_within_one_and_within_some() -> None:
    cluster = on("16x8xh100-80gb")
    assert meshes("ddp", plan=BF16, cluster=cluster) == [Mesh(shard=128)]
    assert meshes("fsdp", plan=BF16, cluster=cluster) == [
        Mesh(shard=128),
        Mesh(replicate=4, shard=32),
        Mesh(replicate=16, shard=8),
    ]
    asked = Mesh(replicate=2, shard=64)
    assert meshes("fsdp", plan=Plan(mesh=asked), cluster=cluster) == [asked]


def test_meshes_are_those_of_the_cluster() -> None:
    for cluster in (on("3x8xa100-80gb"), on("6x4xa100-80gb"), on("2x8xh100-80gb")):
        for mesh in meshes("zero2", plan=BF16, cluster=cluster):
            mesh.check_ranks(cluster.num_ranks)


def test_several_passes_reduce_in_each_where_unsharded_gradients_do_not_fit() -> None:
    """MPT-30B with 21 passes on 8 H100 ran under FSDP, which reduces in every pass."""
    plan = Plan(precision="bf16", engine="torch", recompute="full", micro_batch=3, accumulate=21, reduce_dtype="bf16")
    found = candidates(
        Model("mpt-30b").spec_for,
        plan=plan,
        strategies=["fsdp"],
        cluster=on("8xh100-80gb"),
        optimizer="adamw",
        goal="throughput",
        quick=True,
    )
    assert [(one.plan.accumulate_reduced, one.fits) for one in found] == [(True, "yes")]
    small = candidates(
        Model("mpt-125m").spec_for,
        plan=plan,
        strategies=["fsdp"],
        cluster=on("8xh100-80gb"),
        optimizer="adamw",
        goal="throughput",
        quick=True,
    )
    assert [(one.plan.accumulate_reduced, one.fits) for one in small] == [(False, "yes")]


def test_ddp_sends_twice_and_fsdp_three_times_its_gradients() -> None:
    """All-reduce: 2 (n−1)/n of the gradients in fp32; fsdp: two gathers in bf16 and one reduce-scatter in fp32."""
    spec = spec_for("gpt2-1.5b")
    share = 7 / 8 * spec.num_params
    sent = {
        strategy: sent_bytes(
            job_of(
                spec,
                plan=Plan(strategy=strategy, precision="bf16"),
                num_ranks=8,
                optimizer="adamw",
                device="cuda",
            )
        )
        for strategy in ("ddp", "shard_grad_op", "fsdp")
    }
    assert sent["ddp"] == pytest.approx(2 * 4 * share, rel=1e-3)
    assert sent["shard_grad_op"] == pytest.approx((2 + 4) * share, rel=1e-3)
    assert sent["shard_grad_op"] < sent["fsdp"] < (2 + 2 + 4) * share
