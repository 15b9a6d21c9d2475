"""What would fit if nothing does: other plans first, then smaller batches, then more devices."""

from dataclasses import replace

import pytest

from shardwise.hardware import Cluster, cluster_of
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES
from shardwise.planner.search.way_out import larger_clusters, ways_out

EVERY = list(STRATEGIES)


def on(name: str) -> Cluster:
    return cluster_of(name)


@pytest.mark.parametrize(
    ("model", "cluster", "plan", "strategies", "changed"),
    [
        ("llama-3.1-8b", "8xh100-80gb", Plan(precision="bf16", micro_batch=1), ["ddp"], {"strategy"}),
        ("llama-3.1-8b", "8xh100-80gb", Plan(precision="bf16", micro_batch=2), EVERY, {"recompute"}),
        ("llama-3.1-8b", "8xh100-80gb", Plan(precision="bf16", micro_batch=64), EVERY, {"micro_batch"}),
        ("gpt2-124m", "8xh100-80gb", Plan(precision="fp32", micro_batch=64), EVERY, {"precision"}),
    ],
)
def test_a_way_out_fits_and_changes_as_little_as_can_be(
    model: str, cluster: str, plan: Plan, strategies: list[str], changed: set[str]
) -> None:
    source = Model(model)
    (found,) = ways_out(source.spec_for, plan=plan, strategies=strategies, cluster=on(cluster), optimizer="adamw")
    assert found.fits == "yes"
    differs = {
        key for key in ("micro_batch", "recompute", "precision") if getattr(found.plan, key) != getattr(plan, key)
    }
    differs |= {"strategy"} if found.plan.strategy not in strategies else set()
    differs |= {"devices"} if found.cluster.num_ranks != on(cluster).num_ranks else set()
    assert differs == changed


def test_a_smaller_micro_batch_comes_with_more_passes() -> None:
    source, cluster = Model("llama-3.1-8b"), on("8xh100-80gb")
    plan = Plan(precision="bf16", recompute="full", micro_batch=12)
    (found,) = ways_out(source.spec_for, plan=plan, strategies=EVERY, cluster=cluster, optimizer="adamw")
    assert (found.batch, found.plan.accumulate) == (6, 2)


@pytest.mark.parametrize(("host_gib", "num_ranks"), [(None, [1, 2]), (110, [1, 2]), (50, [2]), (0, [2])])
def test_host_memory_comes_before_more_devices_unless_it_is_too_small(
    host_gib: int | None, num_ranks: list[int]
) -> None:
    ways = ways_out(
        Model("llama-3.1-8b").spec_for,
        plan=Plan(precision="bf16"),
        strategies=EVERY,
        cluster=replace(on("1xh100-80gb"), host_bytes=None if host_gib is None else host_gib * 2**30),
        optimizer="adamw",
    )
    assert [one.cluster.num_ranks for one in ways] == num_ranks
    *here, larger = ways
    assert (larger.plan.recompute, larger.plan.reduce_dtype, larger.node_host_bytes) == ("full", "fp32", 0)
    for one in here:
        assert one.plan.offload_states
        assert one.time is not None
        # At least two moments and masters of 8.03 billion parameters, in fp32.
        assert 3 * 4 * 8.03e9 < one.node_host_bytes <= (host_gib or 110) * 2**30


def test_more_devices_come_as_they_are_rented() -> None:
    sizes = [str(cluster) for cluster in larger_clusters(on("1xh100-80gb"))]
    assert sizes[:5] == [
        "2xh100-80gb",
        "4xh100-80gb",
        "8xh100-80gb",
        "2x8xh100-80gb@ib-8x400",
        "4x8xh100-80gb@ib-8x400",
    ]
    assert str(next(larger_clusters(on("8xrtx-4090")))) == "16xrtx-4090"


def test_torchs_engine_may_recompute_in_the_model() -> None:
    plan = Plan(precision="bf16", micro_batch=1, engine="torch")
    strategies = ["ddp", "shard_grad_op", "fsdp"]
    (found,) = ways_out(
        Model("llama-3.1-8b").spec_for, plan=plan, strategies=strategies, cluster=on("8xa100-40gb"), optimizer="adamw"
    )
    assert (found.plan.recompute, found.plan.strategy, found.plan.engine) == ("full", "shard_grad_op", "torch")


@pytest.mark.whole
def test_gradients_in_16_bits_are_a_way_out_before_more_devices() -> None:
    plan = Plan(precision="bf16", micro_batch=1, recompute="full", engine="torch")
    source = Model("llama-3.1-405b", seq=4096)
    (found,) = ways_out(
        source.spec_for, plan=plan, strategies=["fsdp"], cluster=on("64x8xh100-80gb"), optimizer="adamw"
    )
    assert (found.plan.reduce_dtype, found.cluster.num_ranks) == ("bf16", 512)


def test_what_cannot_fit_has_no_way_out() -> None:
    source = Model("params:900t")
    plan = Plan(precision="bf16", micro_batch=1)
    assert ways_out(source.spec_for, plan=plan, strategies=EVERY, cluster=on("1xl4"), optimizer="adamw") == []
