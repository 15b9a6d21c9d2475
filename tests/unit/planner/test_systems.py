"""Other systems: what each sets is a plan that its engine can cost, and an unknown one is one line."""

from dataclasses import replace

import pytest

from shardwise.base.errors import InvalidPlan, UnknownName
from shardwise.hardware import cluster_of
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.plan.limits import strategies_of
from shardwise.planner.search.candidates import cost
from shardwise.planner.systems import OWN, SYSTEMS, System, system_of


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_a_system_has_a_source_and_strategies_of_its_engine(system: System) -> None:
    assert system.source
    assert system.title
    assert system.strategies
    assert set(system.strategies) <= set(strategies_of(system.engine))
    assert set(system.tensor_seconds) | set(system.buffer_bytes) <= set(strategies_of(system.engine))


def test_deepspeeds_bucket_counts_in_every_total() -> None:
    plan = Plan(strategy="zero2", precision="bf16", micro_batch=1)
    spec, cluster = Model("gpt2-124m").spec_for(plan), cluster_of("8xa100-80gb")
    ours, theirs = (
        cost(spec, plan=plan, cluster=cluster, optimizer="adamw", system=system)
        for system in (OWN, system_of("deepspeed-zero2"))
    )
    for name in ("allocated_bytes", "reserved_bytes", "device_bytes", "at_rest_bytes"):
        assert getattr(theirs.memory, name) - getattr(ours.memory, name) == 10**9
    assert sum(theirs.memory.breakdown_bytes.values()) == theirs.memory.allocated_bytes


def test_an_unknown_system_or_overlap_is_one_line() -> None:
    with pytest.raises(UnknownName, match="did you mean"):
        system_of("deepsped")
    with pytest.raises(InvalidPlan, match="--overlap some: must be one of all, gradients, none"):
        System(overlap="some")


def test_expandable_segments_leave_fewer_gaps() -> None:
    plan = Plan(strategy="fsdp", precision="bf16", micro_batch=4, engine="torch")
    spec, cluster = Model("gpt2-124m").spec_for(plan), cluster_of("8xa100-80gb")
    usual, titan = (
        cost(spec, plan=plan, cluster=cluster, optimizer="adamw", system=system_of(name)).memory
        for name in ("torch-fsdp", "torchtitan")
    )
    gaps, usual_gaps = (found.reserved_bytes - found.allocated_bytes for found in (titan, usual))
    assert 0 <= gaps < usual_gaps
    assert usual.device_bytes - titan.device_bytes == usual.reserved_bytes - titan.reserved_bytes


def test_a_cluster_whose_segments_expand_is_predicted_alike() -> None:
    plan = Plan(strategy="fsdp", precision="bf16", micro_batch=4, engine="torch")
    spec, cluster = Model("gpt2-124m").spec_for(plan), cluster_of("8xa100-80gb")
    expanding = replace(cluster, expands_segments=True)
    usual, found = (cost(spec, plan=plan, cluster=one, optimizer="adamw").memory for one in (cluster, expanding))
    titan = cost(spec, plan=plan, cluster=cluster, optimizer="adamw", system=system_of("torchtitan")).memory
    assert found == titan != usual


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("batch", "recompute"), [(1, "full"), (32, "none")])
def test_without_ddp_gradients_exist_from_backward_to_the_update(batch: int, recompute: str, accumulate: int) -> None:
    plan = Plan(
        strategy="ddp", precision="fp32", micro_batch=batch, engine="torch", recompute=recompute, accumulate=accumulate
    )
    spec, cluster = Model("gpt2-124m").spec_for(plan), cluster_of("1xa100-80gb")
    wrapped, plain = (
        cost(spec, plan=plan, cluster=cluster, optimizer="adamw", system=system, quick=True).memory
        for system in (OWN, system_of("torch"))
    )
    grads = 4 * sum(param.num_elements for unit in spec.units for param in unit.params)
    if accumulate == 2 or batch == 32:
        # Of two passes DDP has the first one's gradients, and buckets; of one pass buckets before there are gradients.
        assert wrapped.allocated_bytes - plain.allocated_bytes == pytest.approx(grads, rel=1e-3)
    else:
        # With one sample the peak is at the end of backward, when all gradients are there.
        assert 4 * grads < plain.allocated_bytes <= wrapped.allocated_bytes
    with pytest.raises(InvalidPlan, match="--like torch: is for one device, not 8; --like torch-ddp"):
        cost(spec, plan=plan, cluster=cluster_of("8xa100-80gb"), optimizer="adamw", system=system_of("torch"))
