"""Matrices that are stepped whole: who owns them, and what that takes in bytes and seconds."""

from dataclasses import replace
from itertools import accumulate
from math import prod

import pytest
from planned_specs import spec_for

from shardwise.base.errors import InvalidModel, InvalidPlan
from shardwise.hardware import cluster_of
from shardwise.hardware.borrowed import kernel_model_of
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh
from shardwise.planner import estimate
from shardwise.planner.job import Job
from shardwise.planner.memory.peak import job_of
from shardwise.planner.memory.replay import Change
from shardwise.planner.memory.states import optimizer_of
from shardwise.planner.time.muon_update import muon_seconds
from shardwise.planner.time.step_time import estimate_time, timeline
from shardwise.planner.traffic import sent_bytes
from shardwise.planner.whole_matrices import WholeMatrix, with_owners
from shardwise.program import Kind
from shardwise.program.spec import TensorSpec

SPEC = spec_for("gpt2-124m")
# 12 blocks: qkv and out of attention, up and down.
BLOCK = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
IN_BLOCKS = 12 * sum(map(prod, BLOCK))


def job(strategy: str, *, num_ranks: int = 8, optimizer: str = "muon", mesh: Mesh | None = None) -> Job:
    plan = Plan(strategy=strategy, precision="bf16", mesh=mesh)
    return job_of(SPEC, plan=plan, num_ranks=num_ranks, optimizer=optimizer, device="cuda")


def test_matrices_of_blocks_have_owners_where_state_is_sharded_and_all_ranks_step_them_where_it_is_not() -> None:
    sharded, replicated = job("zero2"), job("ddp")
    owned = [sum(prod(matrix.param.shape) for matrix in rank) for rank in sharded.matrices.owned]
    assert sum(owned) == IN_BLOCKS
    assert max(owned) <= 1.02 * IN_BLOCKS / 8
    assert not sharded.matrices.on_all
    assert sum(prod(matrix.param.shape) for matrix in replicated.matrices.on_all) == IN_BLOCKS
    assert not any(replicated.matrices.owned)


def test_owners_are_chosen_in_each_copy_of_a_shard_group() -> None:
    assert len(job("fsdp", mesh=Mesh(replicate=2, shard=4)).matrices.owned) == 4


def test_state_is_one_momentum_of_a_matrix_and_two_moments_of_the_rest() -> None:
    elsewhere = SPEC.num_params - IN_BLOCKS
    for strategy, share in (("ddp", 1), ("zero2", 8)):
        found = job(strategy)
        in_slices = sum(sum(states.moments) * found.short.weights.get(u, 1) for u, states in found.states.items())
        assert (in_slices + sum(found.owned_moments)) * share == pytest.approx(
            4 * (IN_BLOCKS + 2 * elsewhere), rel=0.01
        )


def test_both_ways_are_rows_of_the_program_and_are_sent() -> None:
    found = job("zero2")
    for kind, tensors in ((Kind.TO_OWNERS, 2), (Kind.FROM_OWNERS, 1)):
        moved = [
            found.short.weights.get(operation.subject, 1) * operation.num_bytes
            for operation in found.program.operations()
            if operation.kind is kind
        ]
        assert sum(moved) == tensors * 4 * IN_BLOCKS
    more = sent_bytes(found) - sent_bytes(job("zero2", optimizer="adamw"))
    # Of what a rank has, an eighth of all, it keeps an eighth.
    assert more == pytest.approx(3 * 4 * IN_BLOCKS / 8 * 7 / 8, rel=0.001)


def test_both_ways_take_time_and_memory() -> None:
    plan = Plan(strategy="zero2", precision="bf16", micro_batch=1)
    spans = timeline(SPEC, plan=plan, cluster=cluster_of("8xh100-80gb"), optimizer="muon")
    names = [span.name for span in spans if span.queue == "gather"]
    for kind in (Kind.TO_OWNERS, Kind.FROM_OWNERS):
        assert any(name.startswith(f"gather {kind.value} blocks.0") for name in names), names
    (last,) = [row for row in job("zero2").memory_rows if row.label.startswith("after step")]
    changes = [change for change in last.changes if isinstance(change, Change) and change.category == "other"]
    # All that comes goes: values and gradients of an eighth.
    assert sum(change.const + change.others for change in changes) == 0
    highest = max(accumulate(change.const + change.others for change in changes))
    assert highest > 2 * 4 * IN_BLOCKS / 8


def test_an_update_takes_the_products_of_newton_and_schulz() -> None:
    device = cluster_of("1xh100-80gb").device
    matrix = WholeMatrix(
        unit="blocks.0", param=TensorSpec(name="blocks.0.a.weight", shape=(16384, 4096)), num_bytes=4 * 16384 * 4096
    )
    launch, kernel = muon_seconds([matrix], device=device)
    num_flops = 5 * (2 * 2 * 4096**2 * 16384 + 2 * 4096**3)
    at_peak = num_flops / kernel_model_of(device).peak("bf16")
    assert at_peak < kernel < 2 * at_peak
    turned = replace(matrix, param=replace(matrix.param, shape=(4096, 16384)))
    assert muon_seconds([turned], device=device) == (launch, kernel)
    assert muon_seconds([matrix] * 3, device=device) == pytest.approx((3 * launch, 3 * kernel))


def test_the_update_gets_shorter_with_more_owners_and_not_under_ddp() -> None:
    def update(strategy: str, num_ranks: int) -> float:
        plan = Plan(strategy=strategy, precision="bf16", micro_batch=1)
        spans = timeline(SPEC, plan=plan, cluster=cluster_of(f"{num_ranks}xh100-80gb"), optimizer="muon")
        return sum(span.end - span.start for span in spans if (span.queue, span.name) == ("compute", "update matrices"))

    assert update("zero2", 8) < 0.3 * update("zero2", 2)
    assert update("ddp", 8) == pytest.approx(update("ddp", 2))


def test_adamw_is_planned_as_before() -> None:
    """Nothing is owned, and nothing is stepped whole."""
    found = job("fsdp", optimizer="adamw")
    assert not found.plan.owned
    assert not any(found.matrices.owned)
    assert found.owned_moments == ()


def test_what_prepare_would_refuse_is_one_line() -> None:
    rule = optimizer_of("muon")
    plan = Plan(engine="torch", strategy="fsdp")
    with pytest.raises(InvalidPlan, match="fully_shard gives Muon slices of matrices; use engine = 'shardwise'"):
        with_owners(SPEC, plan=plan, optimizer=rule)
    assert with_owners(SPEC, plan=replace(plan, strategy="ddp"), optimizer=rule).owned == ()
    with pytest.raises(InvalidPlan, match="owned with offload_states"):
        with_owners(SPEC, plan=Plan(offload_states=True), optimizer=rule)
    with pytest.raises(
        InvalidModel, match=r"^optimizer muon: .* has no matrix in a layer of a numbered block; use adamw"
    ):
        with_owners(spec_for("resnet50"), plan=Plan(), optimizer=rule)


def test_torchs_ddp_and_the_quick_estimate_take_it_too() -> None:
    for plan in (Plan(strategy="ddp", engine="torch", precision="bf16"), Plan(precision="bf16")):
        spec = spec_for("gpt2-124m", plan)
        found = estimate(spec, plan=plan, num_ranks=8, batch=1, optimizer="muon", quick=True)
        usual = estimate(spec, plan=plan, num_ranks=8, batch=1, optimizer="adamw", quick=True)
        assert found.breakdown_bytes["optim"] < usual.breakdown_bytes["optim"]
        timed = estimate_time(
            spec, plan=replace(plan, micro_batch=1), cluster=cluster_of("8xh100-80gb"), optimizer="muon"
        )
        assert timed is not None
