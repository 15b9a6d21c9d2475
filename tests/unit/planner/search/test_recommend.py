"""Which candidate is taken, and the reasons that are given."""

from dataclasses import replace

import pytest
from planned_specs import spec_for

from shardwise.hardware import cluster_of
from shardwise.placement import STRATEGIES
from shardwise.plan import Plan
from shardwise.planner.search.candidates import Candidate, candidates
from shardwise.planner.search.recommend import Choice, choose, fastest
from shardwise.sources import Source

EVERY = list(STRATEGIES)


def found_for(model: str, cluster: str, *, plan: Plan, goal: str = "throughput") -> tuple[list[Candidate], Choice]:
    source = Source(model)
    found = candidates(
        source.spec_for, plan=plan, strategies=EVERY, cluster=cluster_of(cluster), optimizer="adamw", goal=goal
    )
    return found, choose(found, goal=goal, spec_for=source.spec_for, optimizer="adamw")


@pytest.fixture(scope="module")
def small() -> list[Candidate]:
    return found_for("gpt2-124m", "8xh100-80gb", plan=Plan(precision="bf16", micro_batch=8))[0]


def with_speeds(found: list[Candidate], *speeds: float, fits: str = "yes") -> list[Candidate]:
    """The same, as if they trained so many samples a second."""
    return [
        replace(one, fits=fits, time=replace(one.time, samples_per_s=speed))  # type: ignore[type-var]
        for one, speed in zip(found, speeds, strict=True)
    ]


def test_the_fastest_is_taken(small: list[Candidate]) -> None:
    best = fastest(with_speeds(small, 100, 100, 100, 100, 130))
    assert best is not None
    assert best.plan.strategy == "fsdp"


def test_within_the_band_the_simplest_is_taken(small: list[Candidate]) -> None:
    best = fastest(with_speeds(small, 80, 97, 98, 99, 100))
    assert best is not None
    assert best.plan.strategy == "zero1"


def test_what_does_not_fit_is_not_taken_however_fast() -> None:
    found, choice = found_for("llama-3.1-8b", "8xh100-80gb", plan=Plan(precision="bf16", micro_batch=1))
    assert choice.index is not None
    best = found[choice.index]
    assert best.fits == "yes"
    assert [one.fits for one in found if one.plan.strategy == "ddp"] == ["no"]
    assert "ddp needs 161" in choice.why
    assert "the device has 79.2" in choice.why
    assert "s exposed" in choice.why
    assert "ddp would fit on devices of" in choice.why


def test_the_runner_up_is_told_what_it_needs() -> None:
    _, choice = found_for("gpt2-1.5b", "8xa100-40gb", plan=Plan(precision="bf16", micro_batch=6))
    assert "ddp would fit with micro-batch" in choice.why


def test_for_memorys_sake_the_smallest_is_taken() -> None:
    found, choice = found_for("gpt2-124m", "8xh100-80gb", plan=Plan(precision="bf16"), goal="memory")
    assert choice.index is not None
    peaks = [candidate.memory.allocated_bytes for candidate in found]
    assert peaks[choice.index] == min(peaks)
    assert choice.why.startswith("the smallest peak")


def test_without_a_prediction_of_time_the_simplest_that_fits_is_taken(small: list[Candidate]) -> None:
    untimed = [replace(one, time=None, fits="no" if one.plan.strategy == "ddp" else "yes") for one in small]
    choice = choose(untimed, goal="throughput", spec_for=lambda plan: spec_for("gpt2-124m", plan), optimizer="adamw")
    assert choice.index == 1
    assert "time is not predicted" in choice.why


def test_nothing_that_fits_is_nothing_to_take(small: list[Candidate]) -> None:
    def spec(plan: Plan) -> object:
        raise AssertionError("nobody asks")

    for fits, why in (("no", "nothing fits"), ("unknown", "not known")):
        untimed = [replace(one, fits=fits, time=None) for one in small]
        choice = choose(untimed, goal="throughput", spec_for=spec, optimizer="adamw")  # type: ignore[arg-type]
        assert choice.index is None
        assert why in choice.why


def test_the_fastest_is_taken_where_nobody_knows_what_fits(small: list[Candidate]) -> None:
    unknown = with_speeds(small, 100, 80, 80, 80, 80, fits="unknown")
    choice = choose(unknown, goal="throughput", spec_for=lambda plan: spec_for("gpt2-124m", plan), optimizer="adamw")
    assert choice.index == 0
    assert choice.why.startswith("whether it fits is not known")


def test_what_may_fit_says_so(small: list[Candidate]) -> None:
    tight = [replace(one, fits="tight") for one in small]
    choice = choose(tight, goal="throughput", spec_for=lambda plan: spec_for("gpt2-124m", plan), optimizer="adamw")
    assert choice.why.startswith("it may fit")
