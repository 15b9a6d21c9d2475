"""A step's time: what must hold whatever the constants are."""

from dataclasses import replace
from itertools import pairwise

import pytest
from planned_specs import spec_for

from shardwise.hardware import cluster_of
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES, Mesh
from shardwise.planner.memory.peak import job_of
from shardwise.planner.systems import OWN, system_of
from shardwise.planner.time.host_link import host_bytes_per_s, host_memory_speed
from shardwise.planner.time.step_time import (
    TimeEstimate,
    _prepare,
    _steady,
    block_seconds,
    estimate_time,
    job_on,
    time_job,
    timeline,
    why_not_timed,
)
from shardwise.planner.traffic import sent_bytes
from shardwise.program.spec import ROOT, UnitSpec

FULL = Plan(precision="bf16", recompute="full")
SPEC = spec_for("gpt2-1.5b", FULL, Plan(precision="bf16", strategy="ddp", engine="torch"))


def plan_of(strategy: str, **options: object) -> Plan:
    return replace(Plan(strategy=strategy, precision="bf16", micro_batch=4), **options)  # type: ignore[arg-type]


def timed(plan: Plan, *, cluster: str = "8xh100-80gb", as_graphs: bool = False) -> TimeEstimate:
    found = estimate_time(SPEC, plan=plan, cluster=cluster_of(cluster), as_graphs=as_graphs)
    assert found is not None
    return found


@pytest.mark.parametrize("engine", ["shardwise", "torch"])
@pytest.mark.parametrize("strategy", list(STRATEGIES))
@pytest.mark.parametrize("cluster", ["8xh100-80gb", "64x8xh100-80gb@ib-100"])
@pytest.mark.parametrize("batch", [1, 16])
def test_few_units_take_as_long_as_all_that_they_stand_for(
    engine: str, strategy: str, cluster: str, batch: int
) -> None:
    if engine == "torch" and strategy.startswith("zero"):
        pytest.skip("torch has no such engine")
    mesh = Mesh(replicate=cluster_of(cluster).num_ranks // 8, shard=8)
    for options in (
        {"prefetch": 2, "mesh": mesh},
        {"recompute": "full"} if engine == "shardwise" else {"accumulate": 5},
    ):
        plan = plan_of(strategy, engine=engine, **options)
        where = cluster_of(cluster)
        job = job_on(SPEC, plan=plan, cluster=where, optimizer="adamw")
        short, full = _prepare(job, cluster=where), _prepare(job, cluster=where, shortened=False)
        assert short.job.short.weights
        queues, seconds, cpu_seconds = _steady(short, batch=batch)
        whole, whole_seconds, whole_cpu_seconds = _steady(full, batch=batch)
        assert seconds == pytest.approx(whole_seconds, rel=0.002)
        assert cpu_seconds == pytest.approx(whole_cpu_seconds, rel=1e-6)
        assert queues.sent == pytest.approx(whole.sent, rel=1e-6)
        assert queues.exposed == pytest.approx(whole.exposed, rel=0.02, abs=0.002 * seconds)


def test_no_step_is_longer_than_the_first_after_a_pause() -> None:
    for strategy in STRATEGIES:
        plan, cluster = plan_of(strategy, micro_batch=1), cluster_of("8xh100-80gb")
        first, few, many = (block_seconds(SPEC, plan=plan, cluster=cluster, num_steps=n) for n in (1, 4, 10**6))
        # Where the CPU bounds every step, they are alike up to rounding.
        assert first >= (1 - 1e-7) * few
        assert few >= (1 - 1e-7) * many
        assert many == pytest.approx(timed(plan).step_seconds, rel=1e-5)


def test_a_step_is_never_shorter_than_its_parts() -> None:
    for strategy in STRATEGIES:
        for cluster in ("8xh100-80gb", "4x8xh100-80gb@eth-25"):
            found = timed(plan_of(strategy), cluster=cluster)
            assert found.step_seconds >= found.cpu_seconds
            assert found.step_seconds >= found.exposed_comm_seconds
            assert found.exposed_comm_seconds <= found.comm_seconds


def test_a_larger_batch_takes_longer_and_trains_more() -> None:
    small, large = timed(plan_of("fsdp", micro_batch=2)), timed(plan_of("fsdp", micro_batch=16))
    assert small.step_seconds < large.step_seconds
    assert small.samples_per_s < large.samples_per_s


def test_rates_are_those_of_the_step() -> None:
    found = timed(plan_of("fsdp", accumulate=3))
    assert found.samples_per_s == pytest.approx(3 * 4 * 8 / found.step_seconds)
    assert found.tokens_per_s_per_gpu == pytest.approx(3 * 4 * 1024 / found.step_seconds)


def test_mfu_counts_six_operations_a_parameter_and_token() -> None:
    found = timed(plan_of("fsdp"))
    assert found.tokens_per_s_per_gpu is not None
    assert found.mfu is not None
    dense = 6 * SPEC.num_params * found.tokens_per_s_per_gpu / 989.4e12
    assert dense < found.mfu < 1.2 * dense


def test_mfu_of_a_frozen_model_counts_no_gradients_of_its_parameters() -> None:
    units = tuple(
        replace(unit, params=tuple(replace(one, trainable="head" in one.name) for one in unit.params))
        for unit in SPEC.units
    )
    plan = plan_of("fsdp")
    frozen = estimate_time(replace(SPEC, units=units), plan=plan, cluster=cluster_of("8xh100-80gb"))
    trained = timed(plan)
    assert frozen is not None
    assert frozen.mfu is not None
    assert trained.mfu is not None
    operations = frozen.mfu * frozen.step_seconds / (trained.mfu * trained.step_seconds)
    assert operations == pytest.approx(2 / 3, rel=0.05)


def test_slow_links_show_where_bytes_are_sent() -> None:
    fast, slow = (timed(plan_of("fsdp"), cluster=f"2x8xh100-80gb@{fabric}") for fabric in ("ib-8x400", "eth-10"))
    assert slow.step_seconds > 5 * fast.step_seconds
    assert slow.exposed_comm_seconds > 0.8 * slow.step_seconds


def test_over_slow_fabric_sharding_within_a_node_is_faster() -> None:
    cluster = "4x8xh100-80gb@ib-100"
    flat, hybrid = (timed(plan_of("fsdp", mesh=mesh), cluster=cluster) for mesh in (None, Mesh(replicate=4, shard=8)))
    assert hybrid.step_seconds < flat.step_seconds


def test_slices_are_summed_over_the_nodes_behind_backward() -> None:
    plan = plan_of("fsdp", micro_batch=8, mesh=Mesh(replicate=2, shard=8))
    spans = timeline(SPEC, plan=plan, cluster=cluster_of("2x8xh100-80gb@ib-8x400"))
    slices = [span for span in spans if span.name.startswith("reduce slice")]
    backward_ends = max(span.end for span in spans if span.name.startswith("backward"))
    # All but those of the first block, which backward comes to last, and of the root around it.
    assert len(slices) == 49
    assert sum(span.end > backward_ends for span in slices) == 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_clipping_reads_the_gradients_twice_and_writes_them_once(strategy: str) -> None:
    cluster = cluster_of("8xh100-80gb")
    plan = plan_of(strategy, micro_batch=16)
    plain, clipped = (estimate_time(SPEC, plan=plan, cluster=cluster, clips=clips) for clips in (False, True))
    assert plain is not None
    assert clipped is not None
    num_bytes = 3 * 4 * sum(unit.num_params for unit in SPEC.units) / (8 if strategy == "fsdp" else 1)
    seconds = clipped.step_seconds - plain.step_seconds
    assert seconds > num_bytes / 3.35e12
    assert seconds < num_bytes / 2e12 + 100e-6
    names = [span.name for span in timeline(SPEC, plan=plan, cluster=cluster, clips=True)]
    assert ("reduce norm" in names) == (strategy == "fsdp")
    assert names.index("norm") < names.index("clip") < names.index("update")


def test_zero1_gathers_behind_the_next_forward() -> None:
    plan = plan_of("zero1", micro_batch=16)
    found = timed(plan)
    assert found.exposed_comm_seconds < 0.3 * found.comm_seconds


def test_recomputation_costs_a_forward() -> None:
    plain, again = timed(plan_of("fsdp", micro_batch=16)), timed(plan_of("fsdp", micro_batch=16, recompute="full"))
    assert 1.1 < again.step_seconds / plain.step_seconds < 1.4
    assert again.mfu is not None
    assert plain.mfu is not None
    assert again.mfu < plain.mfu


def test_graphs_of_units_cost_the_cpu_the_operations_of_the_program_and_a_call_each() -> None:
    small = plan_of("fsdp", micro_batch=1)
    plain, units = timed(small), timed(small, as_graphs=True)
    assert units.cpu_seconds < 0.6 * plain.cpu_seconds
    assert units.step_seconds < plain.step_seconds
    # The units that are left out run as without graphs.
    rest = timed(replace(small, uncaptured=("blocks.*",)), as_graphs=True)
    assert rest.cpu_seconds == pytest.approx(plain.cpu_seconds, rel=0.02)


def test_accumulated_passes_reduce_once() -> None:
    """Each pass gathers, and one of four reduces; with accumulate_reduced all do."""
    jobs = [
        job_of(SPEC, plan=plan_of("fsdp", **options), num_ranks=8, optimizer="adamw", device="cuda")
        for options in ({}, {"accumulate": 4}, {"accumulate": 4, "accumulate_reduced": True})
    ]
    once, late, always = map(sent_bytes, jobs)
    assert once < late < 4 * once
    assert always == pytest.approx(4 * once)


def test_many_passes_take_as_long_as_their_number_says() -> None:
    five, nine = (timed(plan_of("fsdp", accumulate=passes)).step_seconds for passes in (5, 9))
    one = timed(plan_of("fsdp")).step_seconds
    assert (nine - five) / 4 < one
    assert 8 * (nine - five) / 4 < nine < 9 * one


def test_the_timeline_is_the_step() -> None:
    plan = plan_of("fsdp", micro_batch=8)
    spans = timeline(SPEC, plan=plan, cluster=cluster_of("8xh100-80gb"))
    found = timed(plan)
    assert max(span.end for span in spans) == pytest.approx(found.step_seconds, rel=0.01)
    gathers = [span for span in spans if span.queue == "gather"]
    # Every block in forward and backward, the last but once; and the root.
    assert len(gathers) == 2 * 48
    for queue in ("compute", "gather", "reduce"):
        ends = [(span.start, span.end) for span in spans if span.queue == queue]
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(ends)), queue


def test_what_cannot_be_timed_says_why() -> None:
    plan, node = plan_of("fsdp"), cluster_of("8xh100-80gb")
    assert why_not_timed(SPEC, plan=plan, cluster=node) is None
    assert "calibrate" in str(why_not_timed(SPEC, plan=plan, cluster=cluster_of("4xcpu")))
    assert "parameters" in str(why_not_timed(replace(SPEC, traces=()), plan=plan, cluster=node))
    assert "dynamic" in str(why_not_timed(SPEC, plan=replace(plan, dynamic=True), cluster=node))
    assert estimate_time(SPEC, plan=replace(plan, dynamic=True), cluster=node) is None


def seconds_of(**settings: object) -> float:
    plan = plan_of("fsdp", **settings)
    found = estimate_time(SPEC, plan=plan, cluster=cluster_of("1xh100-80gb"))
    assert found is not None
    return found.step_seconds


def test_host_memory_takes_time_and_updates_in_backward_hide_it() -> None:
    usual, some, every = seconds_of(), seconds_of(offload_states=("blocks.1*",)), seconds_of(offload_states=True)
    assert usual < some < every
    # Where it computes long enough; otherwise the link bounds both.
    at_step, in_backward = (seconds_of(offload_states=True, update=way, micro_batch=16) for way in ("step", "backward"))
    assert in_backward < 0.95 * at_step
    assert seconds_of(offload_activations=True) >= usual
    # 14 bytes of each parameter go out.
    num_params, cluster = sum(unit.num_params for unit in SPEC.units), cluster_of("1xh100-80gb")
    assert every > 14 * num_params / host_bytes_per_s(cluster, both_ways=True)
    # The CPU computes it after backward, and nothing else runs meanwhile.
    rate = host_memory_speed(cluster.device).updates_per_s
    assert seconds_of(offload_states=True, offload_update="host") > usual + num_params / rate


def test_the_cpu_is_not_far_ahead_of_a_device_that_waits_for_host_memory() -> None:
    """Its queue holds 1024 kernels: without graphs, the rest is issued after the wait."""
    plan = plan_of("fsdp", micro_batch=1, recompute="full", offload_states=("blocks.1*",))
    eager, units = (
        estimate_time(SPEC, plan=plan, cluster=cluster_of("1xh100-80gb"), as_graphs=as_graphs)
        for as_graphs in (False, True)
    )
    assert eager is not None
    assert units is not None
    # With graphs the device alone bounds the step.
    assert units.cpu_seconds < 0.5 * units.step_seconds
    assert max(eager.cpu_seconds, units.step_seconds) < eager.step_seconds < eager.cpu_seconds + units.step_seconds


def test_what_an_update_in_backward_leaves_in_the_queue_delays_the_next_step() -> None:
    """Copies bound these steps: each element's 14 bytes of an update, and 2 in each gather."""
    num_params, cluster = sum(unit.num_params for unit in SPEC.units), cluster_of("1xh100-80gb")
    copies = num_params * (14 / host_bytes_per_s(cluster, both_ways=True) + 2 * 2 / host_bytes_per_s(cluster))
    assert seconds_of(offload_states=True, update="backward", micro_batch=1) == pytest.approx(copies, rel=0.02)


def test_a_bf16_model_that_keeps_its_own_dtypes_is_timed_as_bf16() -> None:
    def in_bf16(unit: UnitSpec) -> UnitSpec:
        return replace(unit, params=tuple(replace(param, dtype="bfloat16") for param in unit.params))

    own = replace(SPEC, units=tuple(map(in_bf16, SPEC.units)))
    native = estimate_time(own, plan=plan_of("ddp", precision="native"), cluster=cluster_of("8xh100-80gb"))
    assert native is not None
    # There is no master to update besides; products take as long.
    assert 0.8 < native.step_seconds / timed(plan_of("ddp")).step_seconds <= 1.0


def test_a_quantised_base_is_multiplied_in_the_dtype_that_it_is_unpacked_to() -> None:
    """Its packed bytes are most of the parameters, and say nothing of the products."""

    def packed(unit: UnitSpec) -> UnitSpec:
        return replace(unit, params=tuple(replace(one, dtype="uint8", trainable=False) for one in unit.params))

    units = (unit if unit.name == ROOT else packed(unit) for unit in SPEC.units)
    quantised = replace(SPEC, units=tuple(units), traces=tuple(one for one in SPEC.traces if one.computes_in == "bf16"))
    quantised = replace(quantised, traces=tuple(replace(one, computes_in="native") for one in quantised.traces))
    plan = plan_of("fsdp", precision="native")
    job = job_of(quantised, plan=plan, num_ranks=8, optimizer="adamw", device="cuda")
    assert job.precision == "bf16"


def test_deepspeed_takes_longer_the_more_it_shards() -> None:
    strategies = ("zero1", "zero2", "fsdp")
    cluster = cluster_of("16xv100-32gb")
    found = []
    for strategy in strategies:
        plan = Plan(strategy=strategy, precision="bf16", recompute="full", micro_batch=1)
        job = job_on(SPEC, plan=plan, cluster=cluster, optimizer="adamw")
        one = time_job(job, batch=1, cluster=cluster, system=system_of("deepspeed"))
        assert one is not None
        found.append(one.step_seconds)
    assert found[0] * 1.05 < found[1]
    assert found[1] * 1.5 < found[2]


def test_selective_recompute_inside_compiled_units_is_fused_on_torchs_engine() -> None:
    """As torchtitan trains: the operations that run again are kernels of the compiler too."""
    plan = Plan(strategy="fsdp", engine="torch", precision="bf16", recompute="selective", micro_batch=4)
    compiled = replace(plan, compile="inductor")
    spec = spec_for("gpt2-1.5b", plan, compiled)
    eager, fused = (estimate_time(spec, plan=one, cluster=cluster_of("8xh100-80gb")) for one in (plan, compiled))
    assert eager is not None
    assert fused is not None
    assert fused.step_seconds < 0.95 * eager.step_seconds
    ours = replace(compiled, engine="shardwise")
    uncompiled = replace(ours, compile="none")
    found = [estimate_time(spec, plan=one, cluster=cluster_of("8xh100-80gb")) for one in (ours, uncompiled)]
    assert found[0] == found[1]


def test_communication_that_nothing_overlaps_takes_its_whole_time() -> None:
    """Over nodes, ZeRO-1's gathers of updated parameters are exposed; with no overlap at all, reductions too."""
    plan = Plan(strategy="zero1", precision="bf16", recompute="full", micro_batch=4)
    cluster = cluster_of("4x8xh100-80gb@ib-2x100")
    job = job_on(SPEC, plan=plan, cluster=cluster, optimizer="adamw")
    found = [
        time_job(job, batch=4, cluster=cluster, system=replace(OWN, overlap=overlap))
        for overlap in ("all", "gradients", "none")
    ]
    seconds = [one.step_seconds for one in found if one is not None]
    exposed = [one.exposed_comm_seconds for one in found if one is not None]
    assert seconds[0] < seconds[1] < seconds[2]
    assert exposed[0] < exposed[1] < exposed[2]
    last = found[2]
    assert last is not None
    assert last.exposed_comm_seconds == pytest.approx(last.comm_seconds, rel=0.01)
