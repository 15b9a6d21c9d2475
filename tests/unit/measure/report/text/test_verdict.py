"""The planner's recommendation in sentences."""

from dataclasses import replace

import pytest

from shardwise.hardware import cluster_of
from shardwise.measure.report.text.verdict import name_of, no_fit, reasons, verdict
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES, Mesh
from shardwise.planner.search.candidates import Candidate, candidates
from shardwise.planner.search.recommend import Condition, Reason, Recommendation, RunnerUp, Simpler

EVERY = list(STRATEGIES)
CLUSTER = cluster_of("8xh100-80gb")


@pytest.fixture(scope="module")
def found() -> dict[str, Candidate]:
    """By strategy; all fit, with the same micro-batch, 0.2 s a step, a tenth of which is exposed."""
    plan = Plan(precision="bf16", micro_batch=8)
    costed = candidates(
        Model("gpt2-124m").spec_for,
        plan=plan,
        strategies=EVERY,
        cluster=CLUSTER,
        optimizer="adamw",
        goal="throughput",
        quick=True,
    )
    return {
        one.plan.strategy: replace(one, time=replace(one.time, step_seconds=0.2, exposed_comm_seconds=0.02))  # type: ignore[type-var]
        for one in costed
    }


def test_what_fits_alone_says_what_communication_costs(found: dict[str, Candidate]) -> None:
    chosen = Recommendation(index=0, best=found["ddp"], reason=Reason.ONLY_ONE)
    assert reasons(chosen) == "the only one that fits; 0.02 of 0.2 s are spent waiting for communication"
    hidden = replace(found["ddp"], time=replace(found["ddp"].time, exposed_comm_seconds=0.00123))  # type: ignore[type-var]
    assert reasons(replace(chosen, best=hidden)) == (
        "the only one that fits; communication is hidden behind compute (0.00123 of 0.2 s exposed)"
    )
    alone = replace(found["ddp"], cluster=cluster_of("1xh100-80gb"))
    assert reasons(replace(chosen, best=alone)).endswith("; one device does not communicate")


def test_a_simpler_plan_says_how_much_slower_than_the_fastest_it_is(found: dict[str, Candidate]) -> None:
    chosen = Recommendation(
        index=1,
        best=found["zero1"],
        reason=Reason.NEARLY_FASTEST,
        slower=0.03,
        fastest=found["fsdp"],
        simpler=Simpler(candidate=found["ddp"], speed=0.8, is_too_large=False),
    )
    why = reasons(chosen)
    assert why == (
        "3% slower than fsdp, the fastest, and simpler (5% or less is within the error); "
        "0.02 of 0.2 s are spent waiting for communication; ddp is 20% slower"
    )
    assert verdict(chosen, why=why) == f"Recommended: zero1, {why}."
    assert reasons(replace(chosen, slower=0.004)).startswith("as fast as fsdp and simpler; ")
    roomier = replace(chosen, best=found["fsdp"], fastest=found["zero1"], slower=0.004)
    assert reasons(roomier).startswith("as fast as zero1 and leaves ")


def test_one_device_has_nothing_to_shard(found: dict[str, Candidate]) -> None:
    chosen = Recommendation(index=0, best=found["ddp"], reason=Reason.NOTHING_TO_SHARD)
    assert reasons(chosen) == "the simplest: one device has nothing to shard"


def test_the_smallest_peak_is_not_called_simpler(found: dict[str, Candidate]) -> None:
    faster = RunnerUp(candidate=found["zero2"], speed=1.04, condition=Condition.PREFERENCE)
    chosen = Recommendation(index=4, best=found["fsdp"], reason=Reason.SMALLEST_PEAK, runner_up=faster)
    assert reasons(chosen).endswith(". zero2 is 4% faster; fsdp has the smaller peak")


def test_what_is_too_large_says_what_it_needs_and_what_there_is(found: dict[str, Candidate]) -> None:
    large = replace(found["ddp"], memory=replace(found["ddp"].memory, device_bytes=150 * 2**30))
    chosen = Recommendation(
        index=4,
        best=found["fsdp"],
        reason=Reason.FASTEST,
        simpler=Simpler(candidate=large, speed=0.8, is_too_large=True),
        runner_up=RunnerUp(candidate=large, speed=0.8, condition=Condition.CAPACITY, capacity_bytes=155 * 2**30),
    )
    why = reasons(chosen)
    assert why.startswith("the fastest that fits; ")
    assert why.endswith("; ddp needs 150.0 GiB, the device has 79.2. ddp would fit on devices of 155 GiB")


@pytest.mark.parametrize(
    ("condition", "plan", "expected"),
    [
        (Condition.PLAN, Plan(micro_batch=3), "fsdp would fit with micro-batch 3"),
        (
            Condition.PLAN,
            Plan(micro_batch=3, recompute="full"),
            "fsdp would fit with --recompute full and micro-batch 3",
        ),
        (
            Condition.LINKS,
            None,
            "fsdp is 10% slower; with faster links, which hide its 0.02 s of communication, it would be the fastest",
        ),
        (Condition.ROOM, None, "fsdp is 10% slower: its micro-batch is at most 8"),
        (Condition.NONE, None, "fsdp is 10% slower, and faster links would not change that"),
    ],
)
def test_a_runner_up_says_what_would_have_to_change(
    condition: Condition, plan: Plan | None, expected: str, found: dict[str, Candidate]
) -> None:
    runner_up = RunnerUp(candidate=found["fsdp"], speed=0.9, condition=condition, plan=plan)
    chosen = Recommendation(index=0, best=found["ddp"], reason=Reason.FASTEST, runner_up=runner_up)
    assert reasons(chosen).partition("communication. ")[2] == expected


@pytest.mark.parametrize("condition", [Condition.PREFERENCE, Condition.LINKS, Condition.ROOM, Condition.NONE])
def test_nothing_is_called_0_percent_slower(condition: Condition, found: dict[str, Candidate]) -> None:
    runner_up = RunnerUp(candidate=found["fsdp"], speed=0.998, condition=condition)
    chosen = Recommendation(index=0, best=found["ddp"], reason=Reason.FASTEST, runner_up=runner_up)
    assert reasons(chosen).endswith(". fsdp is equally fast; ddp is simpler")


def test_a_doubt_comes_first(found: dict[str, Candidate]) -> None:
    for fits, doubt in (
        ("tight", "borderline; the smallest peak, "),
        ("unknown", "whether it fits is not known; the "),
    ):
        best = replace(found["ddp"], fits=fits)
        assert reasons(Recommendation(index=0, best=best, reason=Reason.SMALLEST_PEAK)).startswith(doubt)
    untimed = Recommendation(index=0, best=found["ddp"], reason=Reason.SIMPLEST)
    assert reasons(untimed) == "the simplest strategy that fits; time is not predicted"


def test_nothing_to_take_says_why() -> None:
    unknown = Recommendation(index=None, reason=Reason.CAPACITY_UNKNOWN)
    assert verdict(unknown, why=reasons(unknown)) == "No recommendation: the memory of the device is not known."
    assert reasons(Recommendation(index=None, reason=Reason.NOTHING_FITS)) == "nothing fits"


def test_a_plan_that_needs_more_host_memory_than_there_is_says_so(found: dict[str, Candidate]) -> None:
    cluster = replace(CLUSTER, host_bytes=20 * 2**30)
    short = replace(found["fsdp"], memory=replace(found["fsdp"].memory, host_bytes=3 * 2**30), cluster=cluster)
    text = no_fit([short], has_ways=False)
    assert text == (
        "nothing fits: fsdp needs 24.0 GiB of host memory per node, of 20.0 GiB; also not on 1,024 times the devices"
    )


def test_ways_out_follow_the_verdict(found: dict[str, Candidate]) -> None:
    nothing = Recommendation(index=None, reason=Reason.NOTHING_FITS)
    why = no_fit(list(found.values()), has_ways=True)
    assert verdict(nothing, why=why) == "Nothing fits; what does, the smallest change first:"


def test_a_mesh_of_two_axes_is_named(found: dict[str, Candidate]) -> None:
    hybrid = replace(found["fsdp"], plan=replace(found["fsdp"].plan, mesh=Mesh(replicate=2, shard=4)))
    assert [name_of(one) for one in (found["fsdp"], hybrid)] == ["fsdp", "fsdp on 2×4"]
