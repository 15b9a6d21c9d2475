"""Other systems: what each sets is a plan that its engine can cost, and an unknown one is one line."""

import pytest

from shardwise.errors import InvalidPlan, UnknownName
from shardwise.hardware import cluster_of
from shardwise.plan import Plan
from shardwise.plan.limits import strategies_of
from shardwise.planner.search.candidates import cost
from shardwise.planner.systems import OWN, SYSTEMS, System, system_of
from shardwise.sources import Source


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_a_system_has_a_source_and_strategies_of_its_engine(system: System) -> None:
    assert system.source
    assert system.title
    assert system.strategies
    assert set(system.strategies) <= set(strategies_of(system.engine))
    assert set(system.tensor_seconds) | set(system.buffer_bytes) <= set(strategies_of(system.engine))


def test_deepspeeds_bucket_counts_in_every_total() -> None:
    plan = Plan(strategy="zero2", precision="bf16", micro_batch=1)
    spec, cluster = Source("gpt2-124m").spec_for(plan), cluster_of("8xa100-80gb")
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


def test_expandable_segments_reserve_what_is_allocated() -> None:
    plan = Plan(strategy="fsdp", precision="bf16", micro_batch=4, engine="torch")
    spec, cluster = Source("gpt2-124m").spec_for(plan), cluster_of("8xa100-80gb")
    usual, titan = (
        cost(spec, plan=plan, cluster=cluster, optimizer="adamw", system=system_of(name)).memory
        for name in ("torch-fsdp", "torchtitan")
    )
    assert titan.reserved_bytes == titan.allocated_bytes == usual.allocated_bytes < usual.reserved_bytes
    assert usual.device_bytes - titan.device_bytes == usual.reserved_bytes - titan.reserved_bytes
