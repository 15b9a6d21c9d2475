"""The search: the most that fits, the meshes that are tried, and what would fit if nothing does."""

from dataclasses import replace

import pytest
from planned_specs import spec_for

from shardwise.hardware import Cluster, cluster_of
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import STRATEGIES
from shardwise.planner.memory.peak import job_of
from shardwise.planner.search.candidates import _refined, candidates, cost, largest_batch, meshes, way_out
from shardwise.planner.search.micro_batches import largest_fitting
from shardwise.planner.traffic import sent_bytes
from shardwise.sources import Source

BF16 = Plan(precision="bf16")
EVERY = list(STRATEGIES)


def on(name: str) -> Cluster:
    return cluster_of(name)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64, 1000, 65_536])
def test_the_largest_number_that_fits_is_found(most: int) -> None:
    assert largest_fitting(lambda number: number <= most) == most


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("upper", [64, 100])
def test_it_is_found_from_above_too(most: int, upper: int) -> None:
    assert _refined(upper, fits=lambda number: number <= most) == most


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
        Source("gpt2-124m").spec_for,
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


@pytest.mark.parametrize(
    ("model", "cluster", "plan", "strategies", "changed"),
    [
        ("llama-3.1-8b", "8xh100-80gb", Plan(precision="bf16", micro_batch=1), ["ddp"], {"strategy"}),
        ("llama-3.1-8b", "8xh100-80gb", Plan(precision="bf16", micro_batch=2), EVERY, {"recompute"}),
        ("llama-3.1-8b", "8xh100-80gb", Plan(precision="bf16", micro_batch=64), EVERY, {"micro_batch"}),
        ("llama-3.1-8b", "2xa100-40gb", Plan(precision="bf16", micro_batch=1), EVERY, {"devices", "recompute"}),
        ("gpt2-124m", "8xh100-80gb", Plan(precision="fp32", micro_batch=64), EVERY, {"precision"}),
    ],
)
def test_a_way_out_fits_and_changes_as_little_as_can_be(
    model: str, cluster: str, plan: Plan, strategies: list[str], changed: set[str]
) -> None:
    source = Source(model)
    found = way_out(source.spec_for, plan=plan, strategies=strategies, cluster=on(cluster), optimizer="adamw")
    assert found is not None
    assert found.fits == "yes"
    differs = {
        key for key in ("micro_batch", "recompute", "precision") if getattr(found.plan, key) != getattr(plan, key)
    }
    differs |= {"strategy"} if found.plan.strategy not in strategies else set()
    differs |= {"devices"} if found.cluster.num_ranks != on(cluster).num_ranks else set()
    assert differs == changed


def test_the_smaller_micro_batch_of_a_way_out_is_the_largest_that_fits() -> None:
    source, cluster = Source("llama-3.1-8b"), on("8xh100-80gb")
    plan = Plan(precision="bf16", recompute="full", micro_batch=12)
    found = way_out(source.spec_for, plan=plan, strategies=EVERY, cluster=cluster, optimizer="adamw")
    assert found is not None
    larger = replace(found.plan, micro_batch=found.batch + 1)
    assert cost(source.spec_for(larger), plan=larger, cluster=cluster, optimizer="adamw").fits != "yes"
    # Halving would have gone from 12 to 6.
    assert found.batch == 7


def test_torchs_engine_finds_no_way_out_that_it_cannot_run() -> None:
    plan = Plan(precision="bf16", micro_batch=1, engine="torch")
    strategies = ["ddp", "shard_grad_op", "fsdp"]
    found = way_out(
        Source("llama-3.1-8b").spec_for, plan=plan, strategies=strategies, cluster=on("8xa100-40gb"), optimizer="adamw"
    )
    assert found is None or (found.plan.recompute, found.plan.strategy) == ("none", "fsdp")


def test_what_cannot_fit_has_no_way_out() -> None:
    source = Source("params:900t")
    plan = Plan(precision="bf16", micro_batch=1)
    assert way_out(source.spec_for, plan=plan, strategies=EVERY, cluster=on("1xl4"), optimizer="adamw") is None


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
