"""The rental that is recommended is the best of all rentals, each with the planner's best plan."""

from dataclasses import replace
from itertools import product

import pytest

from shardwise.hardware.device import device_of
from shardwise.hardware.prices import Price, prices
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.planner.search.candidates import cost, largest_batch
from shardwise.planner.search.micro_batches import meshes
from shardwise.planner.search.recommend import best_of
from shardwise.planner.search.rent import Wish, most_cost, most_days, recommended, rentals
from shardwise.planner.search.training_cost import TrainingCost

DEVICES = {device_of(kind): prices()[kind] for kind in ("h100-80gb", "a100-80gb")}
WISH = Wish(plan=Plan(precision="bf16"), num_tokens=2e9)


@pytest.fixture(scope="module")
def exhaustive() -> list[TrainingCost]:
    return rentals(Model("gpt2-124m").spec_for, devices=DEVICES, wish=WISH, looks=None)


def test_the_recommended_rental_is_that_of_the_exhaustive_search(exhaustive: list[TrainingCost]) -> None:
    found = rentals(Model("gpt2-124m").spec_for, devices=DEVICES, wish=WISH, looks=4)
    assert len(found) == 4
    assert found[0] == exhaustive[0]
    assert len(exhaustive) == 8, "two kinds, four counts"


def test_the_plan_of_a_rental_is_the_best_of_every_plan(exhaustive: list[TrainingCost]) -> None:
    """Every strategy, recompute, mesh and its largest micro-batch, costed one by one."""
    source, rented = Model("gpt2-124m"), exhaustive[0].candidate
    every = []
    for strategy, recompute in product(
        ("ddp", "zero1", "zero2", "shard_grad_op", "fsdp"), ("none", "selective", "full")
    ):
        plan = replace(WISH.plan, strategy=strategy, recompute=recompute)
        for mesh in meshes(strategy, plan=plan, cluster=rented.cluster):
            on_mesh = replace(plan, mesh=mesh)
            spec = source.spec_for(on_mesh)
            batch = largest_batch(spec, plan=on_mesh, cluster=rented.cluster, optimizer="adamw")
            sized = replace(on_mesh, micro_batch=batch)
            every.append(cost(spec, plan=sized, cluster=rented.cluster, optimizer="adamw"))
    assert best_of([one for one in every if one.fits == "yes"]) == rented


def test_limits_hold_at_the_upper_end_of_the_error(exhaustive: list[TrainingCost]) -> None:
    for days in (0.01, 0.02, 0.1, 1.0):
        best = recommended(exhaustive, wish=replace(WISH, max_days=days))
        within = [one for one in exhaustive if most_days(one) <= days]
        assert (best is None) == (not within)
        if best is not None:
            assert most_days(best) <= days
            assert most_cost(best) <= 1.055 * min(map(most_cost, within))


def test_with_a_limit_of_price_alone_the_soonest_is_taken(exhaustive: list[TrainingCost]) -> None:
    costs = sorted(map(most_cost, exhaustive))
    wish = replace(WISH, max_price=costs[3])
    best = recommended(exhaustive, wish=wish)
    assert best is not None
    assert most_days(best) == min(most_days(one) for one in exhaustive if most_cost(one) <= costs[3])
    assert recommended(exhaustive, wish=replace(WISH, max_price=costs[0] / 2)) is None


def test_several_machines_are_tried_only_if_one_is_not_enough() -> None:
    source, h100 = Model("gpt2-124m"), {device_of("h100-80gb"): prices()["h100-80gb"]}
    (soon,) = rentals(source.spec_for, devices=h100, wish=replace(WISH, max_days=0.003), looks=1)
    assert soon.candidate.cluster.num_nodes == 4
    (cheap,) = rentals(source.spec_for, devices=h100, wish=replace(WISH, max_price=0.01), looks=1)
    assert cheap.candidate.cluster.num_nodes == 1, "more machines are not cheaper"


def test_one_gpu_is_offered_with_host_memory_where_nothing_fits_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """25 billion bytes of gpt2-1.5b's states do not fit on a small GPU; with its host's memory they do."""
    monkeypatch.setattr("shardwise.planner.search.rent.COUNTS", (1, 2))
    spec_for, device = Model("gpt2-1.5b").spec_for, device_of("rtx-4090")
    price = Price(per_gpu_hour=0.4, source="a test", date="")
    without = rentals(spec_for, devices={device: price}, wish=WISH)
    assert {one.candidate.cluster.num_ranks for one in without} == {2}
    found = rentals(spec_for, devices={device: replace(price, host_bytes=64 * 2**30)}, wish=WISH)
    (alone,) = [one.candidate for one in found if one.candidate.cluster.num_ranks == 1]
    assert (alone.fits, alone.name, bool(alone.plan.offload_states)) == ("yes", "auto", True)
    assert 0 < alone.node_host_bytes <= 64 * 2**30
    assert {one.candidate.node_host_bytes for one in found if one.candidate != alone} == {0}
    too_little = rentals(spec_for, devices={device: replace(price, host_bytes=2**30)}, wish=WISH)
    assert {one.candidate.cluster.num_ranks for one in too_little} == {2}


def test_every_price_has_a_source_and_a_date_and_is_of_a_known_device() -> None:
    for kind, price in prices().items():
        assert device_of(kind).name == kind
        assert "https://" in price.source
        assert price.date > "2026"


def test_a_price_can_be_replaced_and_added() -> None:
    found = prices(["h100-80gb=2.5", "rtx-4090=0.4"])
    assert (found["h100-80gb"].per_gpu_hour, found["rtx-4090"].per_gpu_hour) == (2.5, 0.4)
    assert found["h100-80gb"].source == "--price"
    assert found["h100-80gb"].host_bytes == prices()["h100-80gb"].host_bytes > 0
    assert found["rtx-4090"].host_bytes == 0, "nothing is known of its host"
    assert {one.host_bytes for one in prices(host_bytes=7).values()} == {7}
