"""What to change of a plan that ran out of memory: the least that fits, or what an `auto` plan is solved to again."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from shardwise.hardware import cluster_of
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.planner.search.candidates import Candidate
from shardwise.planner.search.nearest import changed_settings, changes, cost_of_change, fewest_on_host, find_smaller
from shardwise.planner.search.request import AutoRequest
from shardwise.training.config.config import TrainConfig
from shardwise.training.fitting.memory_advice import FullDevice, describe_fit

GIB = 2**30


def told(model: str, *, capacity: float | None, num_ranks: int = 8, **plan: Any) -> Iterator[str]:
    config = TrainConfig.from_dict(
        {
            "task": {"model": model},
            "plan": {"precision": "bf16", **plan},
            "train": {"steps": 1},
            "run": {"folder": "nowhere"},
        }
    )
    room = None if capacity is None else round(capacity * GIB)
    return describe_fit(
        config, full=FullDevice(kind="cuda", title="NVIDIA H200", capacity_bytes=room, num_ranks=num_ranks)
    )


@pytest.mark.parametrize(
    ("capacity", "plan", "change"),
    [
        # States are what is too large: shard them.
        (16, {"strategy": "ddp", "micro_batch": 1}, 'plan.strategy = "zero1"'),
        # They are sharded already, so it is the activations.
        (40, {"strategy": "fsdp", "micro_batch": 16}, 'plan.recompute = "full"'),
        # They are recomputed already: a smaller micro-batch, and more passes, so that a step is the same.
        (
            24,
            {"strategy": "fsdp", "micro_batch": 32, "recompute": "full"},
            "plan.micro_batch = 16, plan.accumulate = 2",
        ),
    ],
)
def test_the_smallest_change_that_fits_is_told_as_keys_of_the_config(
    capacity: float, plan: dict[str, Any], change: str
) -> None:
    predicted, fits = told("gpt-1.3b", capacity=capacity, **plan)
    assert f" of {capacity:.1f} GiB per rank: does not fit (params " in predicted
    assert fits.startswith(f"fits: {change} (")
    assert float(fits.split("(")[1].split()[0]) < capacity


def test_states_of_as_few_units_as_possible_go_to_host_memory() -> None:
    told_by = {"strategy": "fsdp", "micro_batch": 1, "recompute": "full"}
    _, fits = told("gpt-1.3b", capacity=18, num_ranks=1, **told_by)
    some = json.loads(fits.split("plan.offload_states = ")[1].split(" (")[0])
    # 24 blocks; those that forward uses last, whose updates have the most time.
    assert 0 < len(some) < 23
    assert "blocks.23" in some
    assert "blocks.0" not in some
    assert fits.startswith("fits: plan.offload_states")
    _, less = told("gpt-1.3b", capacity=16, num_ranks=1, **told_by, offload_states=some)
    more = json.loads(less.split("plan.offload_states = ")[1].split(" (")[0])
    assert set(some) < set(more)


@pytest.mark.parametrize("least", range(1, 6))
def test_units_are_added_until_a_plan_fits(least: int) -> None:
    names = ("(root)", "blocks.0", "blocks.1", "blocks.2", "blocks.3")

    def count(plan: Plan) -> int:
        return sum(map(plan.has_states_on_host, names))

    tried: list[int] = []

    def fits(plan: Plan) -> bool:
        tried.append(count(plan))
        return count(plan) >= least

    found = fewest_on_host(Plan(offload_states=True), before=Plan(), names=names, fits=fits)
    assert count(found) == least
    assert (found.offload_states is True) == (least == len(names))
    assert len(tried) <= 3
    kept = fewest_on_host(Plan(offload_states=True), before=Plan(offload_states=["blocks.0"]), names=names, fits=fits)
    assert kept.has_states_on_host("blocks.0")
    assert count(kept) == max(2, least)


def test_a_plan_that_should_have_fitted_is_said_to_and_one_that_needs_less_is_named() -> None:
    predicted, fits = told("gpt-1.3b", capacity=139, strategy="fsdp", micro_batch=16)
    assert "should fit, so less was free than the device has" in predicted
    assert fits.startswith("fits: plan.")


def test_where_no_plan_fits_that_is_said() -> None:
    _, fits = told("llama-3.1-8b", capacity=8, num_ranks=1, strategy="ddp", micro_batch=1)
    assert fits.startswith("fits: no change of [plan] on 1 devices")


def test_where_the_size_of_the_device_is_not_known_less_is_named() -> None:
    _, fits = told("gpt2-124m", capacity=None, strategy="ddp", micro_batch=2)
    assert fits.startswith("needs less: plan.")


def test_changes_keep_the_samples_of_a_step_and_begin_with_single_settings() -> None:
    plan = Plan(strategy="zero1", micro_batch=6, accumulate=2)
    found = list(changes(plan))
    assert all(one.micro_batch * one.accumulate == 12 for one in found)
    sizes = [len(changed_settings(one, of=plan).keys() - {"accumulate", "accumulate_reduced"}) for one in found]
    assert all(1 <= size <= 5 for size in sizes)
    firsts = sizes[: next(index for index, size in enumerate(sizes) if size > 1)]
    assert len(firsts) == 3 + 2 + 4
    assert {"offload_states", "precision"} <= {name for one in found for name in changed_settings(one, of=plan)}


def test_an_engine_is_not_told_to_do_what_it_cannot() -> None:
    found = list(changes(Plan(strategy="ddp", micro_batch=2, engine="torch")))
    assert found
    assert not any(one.offload_states or one.offload_activations for one in found)
    assert {one.strategy for one in found} <= {"ddp", "shard_grad_op", "fsdp"}


def test_states_that_one_rank_owns_are_not_to_be_offloaded() -> None:
    found = list(changes(Plan(micro_batch=2, owned=("blocks.*",))))
    assert any(one.offload_activations for one in found)
    assert not any(one.offload_states for one in found)


def smaller(model: str, *, cluster: str = "8xh100-80gb", auto: bool = False, **plan: Any) -> tuple[Candidate, Any]:
    ran_out = Plan(precision="bf16", **plan)
    asked = Plan(precision="bf16", strategy="auto", micro_batch=plan["micro_batch"]) if auto else ran_out
    request = AutoRequest(plan=asked, cluster=cluster_of(cluster), optimizer="adamw-foreach")
    return find_smaller(Model(model, kernels="cuda").spec_for, plan=ran_out, request=request)


@pytest.mark.parametrize("auto", [False, True])
def test_a_plan_that_should_have_fitted_is_followed_by_one_with_a_tenth_less(auto: bool) -> None:
    before, found = smaller("gpt-1.3b", micro_batch=4, auto=auto)
    assert found.memory.device_bytes <= 0.9 * before.memory.device_bytes
    assert found.plan.micro_batch == 4
    assert found.plan.precision == "bf16"
    assert "(predicted 0." in cost_of_change(before, found)
    assert " × the memory and " in cost_of_change(before, found)


def test_what_the_solver_finds_for_an_auto_plan_is_at_least_as_fast_as_the_nearest_change() -> None:
    (_, nearest), (_, solved) = (smaller("gpt-1.3b", micro_batch=4, auto=auto) for auto in (False, True))
    assert solved.time.samples_per_s >= nearest.time.samples_per_s


@pytest.mark.parametrize("auto", [False, True])
def test_where_nothing_else_needs_less_a_step_is_split_into_more_passes_with_the_same_samples(auto: bool) -> None:
    smallest = {"recompute": "full", "offload_activations": True, "offload_states": True, "offload_update": "host"}
    plan = smaller("gpt2-124m", micro_batch=5, auto=auto, **smallest)[1].plan
    assert (plan.micro_batch, plan.accumulate) == (1, 5)
    assert smaller("gpt2-124m", micro_batch=1, auto=auto, **smallest)[1] is None


def test_a_smaller_plan_keeps_the_precision() -> None:
    smallest = {"recompute": "full", "offload_activations": True, "offload_states": True, "offload_update": "host"}
    ran_out = Plan(precision="fp32", micro_batch=1, **smallest)
    request = AutoRequest(plan=ran_out, cluster=cluster_of("8xh100-80gb"), optimizer="adamw-foreach")
    assert find_smaller(Model("gpt2-124m", kernels="cuda").spec_for, plan=ran_out, request=request)[1] is None
