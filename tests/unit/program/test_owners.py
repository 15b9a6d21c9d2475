"""Matrices that one rank each owns: who owns what, and what the program and the planner make of it."""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from planned_specs import spec_for

from shardwise.base.errors import InvalidPlan
from shardwise.hardware import cluster_of
from shardwise.models.specs.spec_store import ready_spec
from shardwise.plan import Plan
from shardwise.plan.patterns import short_patterns
from shardwise.planner.memory.peak import job_of
from shardwise.planner.time.step_time import _prepare, _steady, job_on
from shardwise.planner.traffic import sent_bytes
from shardwise.program import Kind, build
from shardwise.program.owners import assign_owners
from shardwise.program.spec import ROOT

SPEC = spec_for("gpt2-124m")
MATRICES = ("blocks.*.weight",)
CLUSTER = cluster_of("8xh100-80gb")


def matrices(name: str) -> list[tuple[int, ...]]:
    """Of the blocks of a model, as Muon is given them: no embedding, no head."""
    spec = ready_spec(name, ways=())
    assert spec is not None
    return [p.shape for unit in spec.units if unit.name != ROOT for p in unit.params if len(p.shape) == 2]


def most_held(shapes: list[tuple[int, ...]], *, num_ranks: int) -> int:
    owners = assign_owners(shapes, num_ranks=num_ranks)
    held = [0] * num_ranks
    for shape, owner in zip(shapes, owners, strict=True):
        held[owner] += prod(shape)
    assert sum(held) == sum(map(prod, shapes))
    return max(held)


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["gpt2-124m", "gpt-1.3b", "llama-3.1-8b", "vit-large"])
def test_no_rank_owns_much_more_than_its_share_or_the_largest_matrix(name: str, num_ranks: int) -> None:
    shapes = matrices(name)
    share = sum(map(prod, shapes)) / num_ranks
    assert most_held(shapes, num_ranks=num_ranks) <= 1.05 * max(share, *map(prod, shapes))


def test_with_few_matrices_for_each_rank_one_has_the_least_that_it_must() -> None:
    # 5 equal ones on 2 ranks; and 48 of four parts, 24 of three and 24 of one on 64, of which some must have 3 + 3.
    assert most_held([(8, 8)] * 5, num_ranks=2) == 3 * 64
    shapes = matrices("gpt-1.3b")
    assert most_held(shapes, num_ranks=64) == 6 * max(map(prod, shapes)) // 4


def test_the_work_is_shared_where_the_elements_leave_a_choice() -> None:
    # Two of each: a square one takes more products than a narrow one of as many elements.
    owners = assign_owners([(64, 64), (64, 64), (1024, 4), (1024, 4)], num_ranks=2)
    assert sorted(owners[:2]) == sorted(owners[2:]) == [0, 1]


def test_what_ranks_own_already_counts() -> None:
    assert assign_owners([(8, 8)], num_ranks=2, loads=[64, 0]) == [1]


def test_matrices_go_to_their_owners_before_the_update_and_back_before_the_gathers() -> None:
    row = build(SPEC, plan=Plan(strategy="zero2", owned=MATRICES)).rows[-1].operations
    kinds = [operation.kind for operation in row if operation.kind is not Kind.WAIT_GATHER]
    update = kinds.index(Kind.UPDATE)
    assert set(kinds[:update]) == {Kind.TO_OWNERS}
    assert kinds[update + 1 :] == [Kind.FROM_OWNERS] * update + [Kind.GATHER] * (len(kinds) - 2 * update - 1)
    there, back = (
        {one.subject: one.num_bytes for one in row if one.kind is kind} for kind in (Kind.TO_OWNERS, Kind.FROM_OWNERS)
    )
    unit = SPEC.unit("blocks.3")
    owned = sum(4 * param.num_elements for param in unit.params if param.name.endswith("weight"))
    assert back["blocks.3"] == owned
    # With the gradients.
    assert there["blocks.3"] == 2 * owned
    assert not any(unit.startswith("(root)") for unit in there)


@pytest.mark.parametrize("plan", [Plan(strategy="ddp", owned=("*",)), Plan(strategy="fsdp")], ids=["ddp", "none"])
def test_nothing_moves_where_every_rank_has_it_whole_or_nothing_is_owned(plan: Plan) -> None:
    assert not {Kind.TO_OWNERS, Kind.FROM_OWNERS} & {one.kind for one in build(SPEC, plan=plan).operations()}


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_the_planner_counts_what_moves_in_bytes_seconds_and_memory(strategy: str) -> None:
    plan = Plan(strategy=strategy, precision="bf16", micro_batch=4)
    moving = replace(plan, owned=MATRICES)
    jobs = [job_of(SPEC, plan=one, num_ranks=8, optimizer="adamw", device="cuda") for one in (plan, moving)]
    owned = sum(4 * p.num_elements for unit in SPEC.units for p in unit.params if moving.owns(p.name))
    assert sent_bytes(jobs[1]) - sent_bytes(jobs[0]) == pytest.approx(3 * owned * 7 / 64, abs=8)
    seconds = []
    for one in (plan, moving):
        short = _prepare(job_on(SPEC, plan=one, cluster=CLUSTER, optimizer="adamw"), cluster=CLUSTER)
        found = _steady(short, batch=4)
        whole = _steady(
            _prepare(job_on(SPEC, plan=one, cluster=CLUSTER, optimizer="adamw"), cluster=CLUSTER, shortened=False),
            batch=4,
        )
        assert found[1] == pytest.approx(whole[1], rel=0.002)
        seconds.append(found[1])
    least = 3 * owned * 7 / 64 / 900e9
    assert seconds[1] - seconds[0] > least


def test_a_plan_keeps_its_owned_patterns_and_refuses_what_cannot_be(tmp_path: Path) -> None:
    plan = Plan(strategy="zero1", owned=["blocks.*.weight"])  # type: ignore[arg-type]
    assert plan.owned == ("blocks.*.weight",)
    plan.save(tmp_path / "plan.toml")
    assert Plan.load(tmp_path / "plan.toml") == plan
    assert plan.owns("blocks.3.attn.weight")
    assert not plan.owns("head.weight")
    with pytest.raises(InvalidPlan, match="owned"):
        replace(plan, offload_states=True)
    with pytest.raises(InvalidPlan, match="must be a list of parameter-name patterns"):
        Plan(owned="blocks")  # type: ignore[arg-type]


def test_names_that_differ_in_numbers_become_one_pattern_unless_it_takes_in_others() -> None:
    names = ["blocks.0.weight", "blocks.1.weight", "head.weight"]
    assert short_patterns(names, among=[*names, "blocks.0.bias"]) == ("blocks.*.weight", "head.weight")
    assert short_patterns(names[:1], among=names) == ("blocks.0.weight",)
