"""Which candidate is taken, and why, as values."""

from dataclasses import replace

import pytest
from planned_specs import spec_for

from shardwise.hardware import cluster_of
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES
from shardwise.planner.search.candidates import Candidate, candidates
from shardwise.planner.search.recommend import Condition, Reason, Recommendation, best_of, recommend
from shardwise.program.spec import ModelSpec

EVERY = list(STRATEGIES)


def found_for(
    model: str, cluster: str, *, plan: Plan, goal: str = "throughput"
) -> tuple[list[Candidate], Recommendation]:
    source = Model(model)
    found = candidates(
        source.spec_for, plan=plan, strategies=EVERY, cluster=cluster_of(cluster), optimizer="adamw", goal=goal
    )
    return found, recommend(found, goal=goal, spec_for=source.spec_for, optimizer="adamw")


@pytest.fixture(scope="module")
def small() -> list[Candidate]:
    return found_for("gpt2-124m", "8xh100-80gb", plan=Plan(precision="bf16", micro_batch=8))[0]


def nobody_asks(plan: Plan) -> ModelSpec:
    raise AssertionError("nobody asks for a spec")


def with_speeds(found: list[Candidate], *speeds: float, fits: str = "yes") -> list[Candidate]:
    """The same, as if they trained so many samples a second."""
    return [
        replace(one, fits=fits, time=replace(one.time, samples_per_s=speed))  # type: ignore[type-var]
        for one, speed in zip(found, speeds, strict=True)
    ]


def test_the_fastest_is_taken(small: list[Candidate]) -> None:
    best = best_of(with_speeds(small, 100, 100, 100, 100, 130))
    assert best is not None
    assert best.plan.strategy == "fsdp"


def test_within_the_band_the_simplest_is_taken(small: list[Candidate]) -> None:
    best = best_of(with_speeds(small, 80, 97, 98, 99, 100))
    assert best is not None
    assert best.plan.strategy == "zero1"


def with_peaks(found: list[Candidate], *shares: float) -> list[Candidate]:
    """The same, as if their peaks were these shares of the device's memory."""
    return [
        replace(one, memory=replace(one.memory, device_bytes=round(share * one.capacity_bytes)))  # type: ignore[operator]
        for one, share in zip(found, shares, strict=True)
    ]


@pytest.mark.parametrize(
    ("shares", "taken"),
    [
        ((0.97, 0.97, 0.96, 0.96, 0.84), "fsdp"),
        ((0.97, 0.91, 0.96, 0.96, 0.84), "zero1"),
        ((0.97, 0.97, 0.96, 0.96, 0.95), "ddp"),
    ],
)
def test_a_simpler_plan_wins_only_if_it_leaves_memory_where_another_does(
    small: list[Candidate], shares: tuple[float, ...], taken: str
) -> None:
    best = best_of(with_peaks(with_speeds(small, 98, 99, 100, 99, 98), *shares))
    assert best is not None
    assert best.plan.strategy == taken


@pytest.mark.parametrize(("slowest", "taken"), [(94.6, "ddp"), (94.4, "zero1")])
def test_the_band_is_in_whole_percent_as_it_is_printed(small: list[Candidate], slowest: float, taken: str) -> None:
    best = best_of(with_speeds(small, slowest, 99, 99, 99, 100))
    assert best is not None
    assert best.plan.strategy == taken


def test_on_one_device_there_is_nothing_to_shard(small: list[Candidate]) -> None:
    alone = [replace(one, cluster=cluster_of("1xh100-80gb")) for one in with_speeds(small, 80, 80, 80, 80, 100)]
    choice = recommend(alone, goal="throughput", spec_for=nobody_asks, optimizer="adamw")
    assert (choice.index, choice.reason, choice.runner_up) == (0, Reason.NOTHING_TO_SHARD, None)


def test_all_speeds_are_relative_to_the_fastest(small: list[Candidate]) -> None:
    choice = recommend(
        with_speeds(small, 90, 96, 98, 99, 100), goal="throughput", spec_for=nobody_asks, optimizer="adamw"
    )
    assert choice.reason is Reason.NEARLY_FASTEST
    assert (choice.index, choice.slower) == (1, pytest.approx(0.04))
    assert choice.fastest is not None
    assert choice.fastest.plan.strategy == "fsdp"
    assert choice.simpler is not None
    assert choice.simpler.speed == pytest.approx(0.9)


def test_what_does_not_fit_is_not_taken_however_fast() -> None:
    found, choice = found_for("llama-2-13b", "8xh100-80gb", plan=Plan(precision="bf16", micro_batch=1))
    assert choice.index is not None
    best = found[choice.index]
    assert best.fits == "yes"
    assert [one.fits for one in found if one.plan.strategy == "ddp"] == ["no"]
    assert choice.best is best
    assert choice.reason is Reason.ONLY_ONE
    assert choice.simpler is not None
    assert (choice.simpler.candidate.plan.strategy, choice.simpler.is_too_large) == ("ddp", True)
    assert choice.runner_up is not None
    assert choice.runner_up.condition is Condition.CAPACITY
    assert choice.runner_up.candidate.plan.strategy == "ddp"
    assert choice.runner_up.capacity_bytes is not None
    assert choice.runner_up.capacity_bytes > choice.runner_up.candidate.memory.device_bytes


def test_a_runner_up_that_is_too_large_comes_with_the_plan_that_fits() -> None:
    _, choice = found_for("gpt2-1.5b", "8xa100-40gb", plan=Plan(precision="bf16", micro_batch=6))
    assert choice.runner_up is not None
    assert choice.runner_up.condition is Condition.PLAN
    assert choice.runner_up.plan is not None
    assert choice.runner_up.plan.strategy == "ddp"
    assert choice.runner_up.plan.micro_batch is not None
    assert choice.runner_up.plan.micro_batch < 6


@pytest.mark.parametrize(
    ("speeds", "condition"),
    [((100, 70, 70, 70, 99), Condition.LINKS), ((100, 50, 50, 50, 50), Condition.NONE)],
)
def test_a_runner_up_that_fits_is_the_fastest_that_lost(
    small: list[Candidate], speeds: tuple[float, ...], condition: Condition
) -> None:
    choice = recommend(with_speeds(small, *speeds), goal="throughput", spec_for=nobody_asks, optimizer="adamw")
    assert choice.index == 0
    assert choice.runner_up is not None
    assert choice.runner_up.speed == pytest.approx(max(speeds[1:]) / 100)
    assert choice.runner_up.condition is condition


def test_for_memorys_sake_the_smallest_is_taken() -> None:
    found, choice = found_for("gpt2-124m", "8xh100-80gb", plan=Plan(precision="bf16"), goal="memory")
    assert choice.index is not None
    peaks = [candidate.memory.allocated_bytes for candidate in found]
    assert peaks[choice.index] == min(peaks)
    assert choice.reason is Reason.SMALLEST_PEAK


def test_without_a_prediction_of_time_the_simplest_that_fits_is_taken(small: list[Candidate]) -> None:
    untimed = [replace(one, time=None, fits="no" if one.plan.strategy == "ddp" else "yes") for one in small]
    choice = recommend(untimed, goal="throughput", spec_for=lambda plan: spec_for("gpt2-124m", plan), optimizer="adamw")
    assert choice.index == 1
    assert choice.reason is Reason.SIMPLEST


def test_nothing_that_fits_is_nothing_to_take(small: list[Candidate]) -> None:
    for fits, reason in (("no", Reason.NOTHING_FITS), ("unknown", Reason.CAPACITY_UNKNOWN)):
        untimed = [replace(one, fits=fits, time=None) for one in small]
        choice = recommend(untimed, goal="throughput", spec_for=nobody_asks, optimizer="adamw")
        assert choice.index is None
        assert choice.reason is reason


def test_the_fastest_is_taken_where_nobody_knows_what_fits(small: list[Candidate]) -> None:
    unknown = with_speeds(small, 100, 80, 80, 80, 80, fits="unknown")
    choice = recommend(unknown, goal="throughput", spec_for=lambda plan: spec_for("gpt2-124m", plan), optimizer="adamw")
    assert choice.index == 0
    assert choice.best is not None
    assert (choice.best.fits, choice.reason) == ("unknown", Reason.FASTEST)


def test_what_may_fit_is_taken_where_nothing_does_for_sure(small: list[Candidate]) -> None:
    tight = [replace(one, fits="tight") for one in small]
    choice = recommend(tight, goal="throughput", spec_for=lambda plan: spec_for("gpt2-124m", plan), optimizer="adamw")
    assert choice.best is not None
    assert choice.best.fits == "tight"
