"""The search: the most that fits, the simplest that fits, and what would fit if nothing does."""

import pytest
from planned_specs import spec_for

from shardwise.hardware import Cluster, cluster_of
from shardwise.placement import STRATEGIES
from shardwise.plan import Plan
from shardwise.planner.search import _largest, _refined, candidates, cost, largest_batch, recommend, way_out
from shardwise.planner.traffic import sent_bytes
from shardwise.sources import Source

BF16 = Plan(precision="bf16")
EVERY = list(STRATEGIES)


def on(name: str) -> Cluster:
    return cluster_of(name)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64, 1000, 65_536])
def test_the_largest_number_that_fits_is_found(most: int) -> None:
    assert _largest(lambda number: number <= most) == most


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


def test_the_simplest_that_fits_is_recommended() -> None:
    for cluster, expected in (("8xh100-80gb", "ddp"), ("8xv100-16gb", None)):
        found = candidates(
            Source("gpt2-1.5b", seq=1024).spec_for,
            plan=Plan(precision="bf16", micro_batch=1),
            strategies=EVERY,
            cluster=on(cluster),
            optimizer="adamw",
            goal="throughput",
        )
        best, why = recommend(found, goal="throughput")
        assert best is not None
        assert "simplest" in why
        assert found[best].plan.strategy == (expected or found[best].plan.strategy)
        assert all(candidate.fits == "no" for candidate in found[:best])


def test_for_memorys_sake_the_smallest_is_recommended() -> None:
    found = candidates(
        Source("gpt2-124m").spec_for,
        plan=BF16,
        strategies=EVERY,
        cluster=on("8xh100-80gb"),
        optimizer="adamw",
        goal="memory",
    )
    best, _ = recommend(found, goal="memory")
    assert best is not None
    assert all(candidate.batch == 1 for candidate in found)
    peaks = [candidate.memory.allocated_bytes for candidate in found]
    assert peaks[best] == min(peaks)


@pytest.mark.parametrize(
    ("model", "cluster", "plan", "strategies", "expected"),
    [
        ("llama-3.1-8b", "8xh100-80gb", Plan(precision="bf16", micro_batch=1), ["ddp"], "--strategy fsdp"),
        ("llama-3.1-8b", "8xh100-80gb", Plan(precision="bf16", micro_batch=2), EVERY, "--recompute"),
        ("llama-3.1-8b", "8xh100-80gb", Plan(precision="bf16", micro_batch=64), EVERY, "--micro-batch"),
        ("llama-3.1-8b", "2xa100-40gb", Plan(precision="bf16", micro_batch=1), EVERY, "devices"),
        ("gpt2-124m", "8xh100-80gb", Plan(precision="fp32", micro_batch=64), EVERY, "--precision bf16"),
    ],
)
def test_a_way_out_fits(model: str, cluster: str, plan: Plan, strategies: list[str], expected: str) -> None:
    source = Source(model)
    found = way_out(source.spec_for, plan=plan, strategies=strategies, cluster=on(cluster), optimizer="adamw")
    assert found is not None
    assert expected in found


def test_what_cannot_fit_has_no_way_out() -> None:
    source = Source("params:900t")
    plan = Plan(precision="bf16", micro_batch=1)
    assert way_out(source.spec_for, plan=plan, strategies=EVERY, cluster=on("1xl4"), optimizer="adamw") is None


def test_ddp_sends_twice_and_fsdp_three_times_its_gradients() -> None:
    """All-reduce: 2 (n−1)/n of the gradients in fp32; fsdp: two gathers in bf16 and one reduce-scatter in fp32."""
    spec = spec_for("gpt2-1.5b")
    share = 7 / 8 * spec.num_params
    sent = {
        strategy: sent_bytes(spec, plan=Plan(strategy=strategy, precision="bf16"), num_ranks=8)
        for strategy in ("ddp", "shard_grad_op", "fsdp")
    }
    assert sent["ddp"] == pytest.approx(2 * 4 * share, rel=1e-3)
    assert sent["shard_grad_op"] == pytest.approx((2 + 4) * share, rel=1e-3)
    assert sent["shard_grad_op"] < sent["fsdp"] < (2 + 2 + 4) * share
