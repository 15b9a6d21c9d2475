"""A plan that ran out of memory: which one comes next, and whether it splits the passes of a step."""

from typing import Any

import pytest

from shardwise.hardware import cluster_of
from shardwise.plan import Plan
from shardwise.sources import Source
from shardwise.train.smaller_plan_search import SmallerPlan, SmallerPlanSearch


def smaller(model: str, *, cluster: str = "8xh100-80gb", solves: bool = False, **plan: Any) -> SmallerPlan:
    search = SmallerPlanSearch(
        spec_for=Source(model, kernels="cuda").spec_for,
        cluster=cluster_of(cluster),
        optimizer="adamw-foreach",
        goal="throughput",
        mesh=None,
        solves=solves,
    )
    return search.run(Plan(precision="bf16", **plan))


@pytest.mark.parametrize("solves", [False, True])
def test_a_pass_is_split_where_that_is_predicted_to_be_faster_than_recomputing(solves: bool) -> None:
    searched = smaller("gpt2-124m", solves=solves, micro_batch=16, accumulate=2)
    before, found = searched.before, searched.found
    assert found is not None
    assert (found.plan.micro_batch, found.plan.accumulate) == (8, 4)
    assert found.memory.device_bytes <= 0.9 * before.memory.device_bytes
    assert searched.cost.startswith("the same samples in 4 passes instead of 2; predicted 0.")


def test_passes_stay_as_they_are_where_that_is_predicted_to_be_faster() -> None:
    searched = smaller("gpt-1.3b", micro_batch=4)
    assert searched.found is not None
    assert (searched.found.plan.micro_batch, searched.found.plan.recompute) == (4, "selective")
    assert searched.cost.startswith("predicted 0.")


def test_passes_stay_as_they_are_where_speed_is_not_predicted_and_a_plan_is_left() -> None:
    found = smaller("gpt2-124m", cluster="2xcpu", micro_batch=16).found
    assert found is not None
    assert found.time is None
    assert (found.plan.micro_batch, found.plan.recompute) == (16, "selective")


def test_an_odd_number_of_samples_is_split_into_equal_passes() -> None:
    found = smaller("llama-3.1-8b", micro_batch=3).found
    assert found is not None
    assert (found.plan.micro_batch, found.plan.accumulate) == (1, 3)


def test_no_plan_is_smaller_for_a_single_sample_under_the_smallest_plan() -> None:
    smallest = {"recompute": "full", "offload_activations": True, "offload_states": True}
    assert smaller("gpt2-124m", micro_batch=1, **smallest).found is None
