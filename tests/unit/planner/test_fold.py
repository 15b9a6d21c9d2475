"""Equal blocks are folded into a few that stand for all; units that differ are not."""

from dataclasses import replace
from typing import Any

import pytest
from planned_specs import spec_for

from shardwise.base.errors import InvalidPlan
from shardwise.hardware import cluster_of
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh
from shardwise.planner.fold import cut, shorten
from shardwise.planner.job import Job
from shardwise.planner.memory.peak import estimate, job_of
from shardwise.planner.search.candidates import candidates, cost
from shardwise.program.spec.step import Run

MODEL = "gpt2-1.5b"
PLAN = Plan(strategy="fsdp", precision="bf16", mesh=Mesh(shard=8))
ONE = replace(PLAN, overrides={"blocks.16": "ddp"})
DIFFERENT: list[dict[str, Any]] = [
    {"overrides": {"blocks.16": "ddp"}},
    {"overrides": {"blocks.24": "zero1"}},
    {"overrides": {"blocks.1": "shard_grad_op"}},
    {"overrides": {"blocks.2?": "zero2", "blocks.25": "ddp"}},
    {"overrides": {"blocks.[13579]": "ddp", "blocks.*[13579]": "shard_grad_op"}},
    {"overrides": {"blocks.30": "fsdp"}},
    {"recompute_overrides": {"blocks.24": "full"}},
    {"recompute": "full", "recompute_overrides": {"blocks.24": "none", "blocks.3?": "selective"}},
    {"overrides": {"blocks.16": "ddp"}, "recompute_overrides": {"blocks.17": "full"}, "prefetch": 3},
]


def job(plan: Plan) -> Job:
    return job_of(spec_for(MODEL, plan), plan=plan, num_ranks=8, optimizer="adamw-fused", device="cuda")


def run_of(found: Job) -> Run:
    (run,) = found.traces["none"].runs
    return run


@pytest.mark.parametrize("different", DIFFERENT, ids=str)
def test_memory_is_that_of_all_units(different: dict[str, Any]) -> None:
    folded = job(replace(PLAN, **different))
    whole = folded.unshortened
    for batch in (1, 4, 32):
        assert folded.replayed.peak(batch).breakdown(batch) == whole.replayed.peak(batch).breakdown(batch)
    assert [line.at(4) for line in folded.at_rest] == [line.at(4) for line in whole.at_rest]


@pytest.mark.parametrize("different", DIFFERENT, ids=str)
def test_what_is_folded_stands_for_every_unit_and_leaves_no_pattern_unmatched(different: dict[str, Any]) -> None:
    plan = replace(PLAN, **different)
    spec = spec_for(MODEL, plan)
    run = run_of(job(plan))
    folded = shorten(spec, plan=plan, runs=[run])
    assert sum(folded.weights.get(unit.name, 1) for unit in folded.spec.units) == len(spec.units)
    for short in (folded, cut(spec, plan=plan, runs=[run], length=4), cut(spec, plan=plan, runs=[run], length=28)):
        kept = plan.placements(unit.name for unit in short.spec.units)
        assert kept.items() <= plan.placements(unit.name for unit in spec.units).items()
        names = short.chosen.get(run, run.units)
        assert (names[0], names[-1]) == (run.units[0], run.units[-1])


def test_a_unit_that_differs_splits_its_run() -> None:
    folded = job(ONE)
    assert "blocks.16" in folded.states
    assert sorted(folded.short.weights) == ["blocks.21", "blocks.4"]
    assert len(folded.short.spec.units) == 18
    for length in (4, 28, 40):
        assert "blocks.16" in folded.cut(length).states


def test_units_that_are_only_named_are_folded_like_others() -> None:
    """An override that says what the strategy says changes nothing but the unit that it has to match."""
    named = replace(PLAN, overrides={"blocks.30": "fsdp"})
    plain, other = (estimate(spec_for(MODEL), plan=plan, num_ranks=8, batch=4, quick=True) for plan in (PLAN, named))
    assert other.breakdown_bytes == plain.breakdown_bytes
    assert len(job(named).short.spec.units) == len(job(PLAN).short.spec.units) + 1


def test_one_replicated_block_costs_more_than_none_and_less_than_all() -> None:
    cluster = cluster_of("8xa100-40gb")
    plans = [PLAN, ONE, replace(PLAN, strategy="ddp")]
    spec = spec_for(MODEL)
    at_rest = [estimate(spec, plan=plan, num_ranks=8, batch=4).at_rest_bytes for plan in plans]
    assert at_rest == sorted(set(at_rest))
    found = [cost(spec, plan=replace(plan, micro_batch=4), cluster=cluster, optimizer="adamw") for plan in plans]
    for key in ("allocated_bytes", "reserved_bytes", "device_bytes"):
        peaks = [getattr(one.memory, key) for one in found]
        assert peaks == sorted(set(peaks))


def test_its_time_is_that_of_all_units() -> None:
    cluster, plan = cluster_of("8xa100-40gb"), replace(ONE, micro_batch=4)
    found = cost(spec_for(MODEL), plan=plan, cluster=cluster, optimizer="adamw", quick=True)
    # Without runs nothing is folded.
    spec = spec_for(MODEL)
    whole = replace(spec, traces=tuple(replace(t, rows=tuple(t.expand()), runs=()) for t in spec.traces))
    expected = cost(whole, plan=plan, cluster=cluster, optimizer="adamw", quick=True)
    assert found.time is not None
    assert expected.time is not None
    assert found.time.step_seconds == pytest.approx(expected.time.step_seconds, rel=1e-3)
    assert found.sent_bytes == expected.sent_bytes


def test_the_search_costs_a_plan_with_such_an_override() -> None:
    plan = replace(ONE, mesh=None)
    cluster = cluster_of("8xa100-40gb")
    (found,) = candidates(
        Model(MODEL).spec_for, plan=plan, strategies=["fsdp"], cluster=cluster, optimizer="adamw", goal="throughput"
    )
    assert found.fits == "yes"
    assert found.batch > 1


def test_a_pattern_that_matches_no_unit_of_the_model_is_still_refused() -> None:
    with pytest.raises(InvalidPlan, match=r"overrides\.blocks\.48 matches no unit"):
        job(replace(PLAN, overrides={"blocks.48": "ddp"}))
