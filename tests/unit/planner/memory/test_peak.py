"""Predictions hang together: categories add up, states scale, a shortened model is the whole one."""

import itertools
from dataclasses import replace

import pytest
import torch
from planned_specs import spec_for

from shardwise.base.errors import InvalidPlan
from shardwise.base.vocabulary.categories import CATEGORIES
from shardwise.models.specs.states_only import states_only
from shardwise.models.trace import Way, trace_model
from shardwise.plan import Plan
from shardwise.plan.placement import SHARDED, STRATEGIES, Mesh
from shardwise.planner import estimate
from shardwise.planner.fold import Short, shorten
from shardwise.planner.job import Job
from shardwise.planner.memory.peak import _traces
from shardwise.program.spec import ModelSpec, UnitSpec

PLANS = [
    *(Plan(precision="bf16", strategy=name, engine="torch", accumulate=3) for name in ("ddp", "shard_grad_op", "fsdp")),
    *(Plan(strategy=strategy, precision="bf16") for strategy in STRATEGIES),
    Plan(precision="bf16", recompute="full", prefetch=3),
    Plan(precision="bf16", recompute="selective", reduces_in_flight=2),
    Plan(precision="bf16", recompute="full", piece_bytes=2**25),
    Plan(precision="fp32", overrides={"blocks.1?": "ddp", "blocks.2*": "shard_grad_op"}),
    Plan(precision="bf16", recompute="full", recompute_overrides={"blocks.1?": "none"}),
    Plan(precision="bf16", mesh=Mesh(replicate=2, shard=4)),
    Plan(precision="bf16", mesh=Mesh(replicate=8), reduce_dtype="bf16", accumulate=2, recompute="full"),
    Plan(precision="bf16", strategy="ddp", engine="torch"),
    Plan(precision="bf16", strategy="fsdp", engine="torch"),
    Plan(precision="bf16", strategy="shard_grad_op", engine="torch"),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.engine}-{plan.strategy}-{plan.recompute}")
def test_a_shortened_model_has_the_peak_of_the_whole_one(plan: Plan) -> None:
    shortened, whole = peaks_of(spec_for("gpt2-1.5b", plan), plan=plan)
    assert shortened == pytest.approx(whole, rel=0.002)


def peaks_of(spec: ModelSpec, *, plan: Plan) -> list[list[int]]:
    """At three batches: of the shortened model, and of the whole one."""
    plan = replace(plan, mesh=plan.mesh or Mesh(shard=8))
    traces = _traces(spec, plan=plan)
    peaks = []
    for short in (
        shorten(spec, plan=plan, runs=traces["none"].runs),
        Short(spec=spec, weights={}, chosen={}),
    ):
        job = Job(spec=spec, plan=plan, short=short, traces=traces, optimizer_name="adamw", device="cuda")
        peaks.append([job.replayed.peak(batch).total(batch) for batch in (1, 4, 32)])
    return peaks


@pytest.fixture(scope="module")
def llama() -> ModelSpec:
    """What its recomputed forward makes is freed only when its gradients are there."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=64, use_cache=False)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").train()
    return trace_model(
        model,
        loss=lambda model, ids: model(input_ids=ids, labels=ids).loss,
        make_batch=lambda size: torch.randint(64, (size, 128)),
        ways=[Way(computes_in="bf16", recompute=recompute, device="cuda") for recompute in ("none", "full")],
    )


@pytest.mark.parametrize("strategy", ["zero2", "shard_grad_op", "fsdp"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_so_has_one_of_64_blocks_that_hold_what_they_recompute(llama: ModelSpec, strategy: str, recompute: str) -> None:
    shortened, whole = peaks_of(llama, plan=Plan(strategy=strategy, precision="bf16", recompute=recompute))
    assert shortened == pytest.approx(whole, rel=0.002)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_categories_add_up_to_what_is_allocated(strategy: str) -> None:
    plan = Plan(strategy=strategy, precision="bf16")
    found = estimate(spec_for("gpt2-124m"), plan=plan, num_ranks=8, batch=4)
    assert tuple(found.breakdown_bytes) == CATEGORIES
    assert sum(found.breakdown_bytes.values()) == found.allocated_bytes <= found.reserved_bytes < found.device_bytes
    assert all(num_bytes >= 0 for num_bytes in found.breakdown_bytes.values())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_sharded_falls_with_the_number_of_ranks(strategy: str) -> None:
    placement = STRATEGIES[strategy]
    spec = spec_for("gpt2-124m", Plan(precision="fp32"))
    few, many = (
        estimate(spec, plan=Plan(strategy=strategy), num_ranks=n, batch=1, quick=True).breakdown_bytes for n in (2, 64)
    )
    assert few["optim"] == pytest.approx(many["optim"] * (32 if placement.optim is SHARDED else 1), rel=0.02)
    assert few["params"] == pytest.approx(many["params"] * (32 if placement.params is SHARDED else 1), rel=0.02)


def test_more_sharding_never_takes_more() -> None:
    spec = spec_for("llama-3.1-8b")
    peaks = [
        estimate(spec, plan=Plan(strategy=strategy, precision="bf16"), num_ranks=8, batch=1, quick=True).allocated_bytes
        for strategy in STRATEGIES
    ]
    assert peaks == sorted(peaks, reverse=True)


def test_recomputation_takes_less() -> None:
    plans = [Plan(precision="bf16", recompute=how) for how in ("none", "selective", "full")]
    spec = spec_for("llama-3.1-8b", *plans)
    peaks = [estimate(spec, plan=plan, num_ranks=8, batch=4, quick=True).allocated_bytes for plan in plans]
    assert peaks == sorted(peaks, reverse=True)


def test_offloaded_activations_take_less() -> None:
    spec = spec_for("llama-3.1-8b")
    here, away = (
        estimate(spec, plan=Plan(precision="bf16", offload_activations=away), num_ranks=8, batch=2)
        for away in (False, True)
    )
    assert away.breakdown_bytes["activations"] < here.breakdown_bytes["activations"] / 4
    # The allocator uses the memory again in which they lay.
    freed = here.allocated_bytes - away.allocated_bytes
    assert here.reserved_bytes - away.reserved_bytes == pytest.approx(freed, rel=0.1)


def test_host_memory_holds_the_inputs_of_units_and_once_what_they_share() -> None:
    spec = spec_for("llama-3.1-8b", plan := Plan(precision="bf16", recompute="full", offload_activations=True))
    assert spec.seq is not None
    inputs = 32 * 2 * spec.seq * 4096 * 2  # blocks, batch, tokens, width, bf16
    tables = 2 * spec.seq * 64 * 4  # cos and sin of half a head, fp32, for any batch
    assert estimate(spec, plan=plan, num_ranks=8, batch=2, quick=True).host_bytes == inputs + tables


@pytest.mark.parametrize("engine", ["shardwise", "torch"])
def test_accumulation_holds_gradients_from_pass_to_pass(engine: str) -> None:
    spec = spec_for("gpt2-124m", Plan(precision="bf16", engine=engine))
    plain = Plan(precision="bf16", mesh=Mesh(shard=8), engine=engine)
    kept = replace(plain, accumulate=4)
    reduced = replace(plain, accumulate=4, accumulate_reduced=True)
    rest = [
        estimate(spec, plan=plan, num_ranks=8, batch=4, quick=True).at_rest_bytes for plan in (plain, reduced, kept)
    ]
    grads = 4 * spec.num_params
    assert rest[1] - rest[0] == pytest.approx(grads / 8, rel=0.01)
    assert rest[2] - rest[0] == pytest.approx(grads, rel=0.01)


def test_a_longer_sample_takes_more() -> None:
    short, long = (
        estimate(spec_for("llama-3.1-8b", seq=seq), plan=Plan(precision="bf16"), num_ranks=8, batch=1, quick=True)
        for seq in (4096, 8192)
    )
    assert long.breakdown_bytes["activations"] == pytest.approx(2 * short.breakdown_bytes["activations"], rel=0.02)


def test_without_a_trace_there_are_states_and_nothing_else() -> None:
    found = estimate(states_only("params:60b"), plan=Plan(precision="bf16"), num_ranks=64, batch=1)
    assert not found.activations_known
    assert found.breakdown_bytes["activations"] == 0
    assert found.breakdown_bytes["optim"] == pytest.approx(60e9 * 12 / 64, rel=0.01)


def test_a_mesh_of_other_ranks_and_an_empty_batch_are_refused() -> None:
    spec = spec_for("gpt-tiny")
    with pytest.raises(InvalidPlan, match="mesh 1×4 is 4 ranks"):
        estimate(spec, plan=Plan(mesh=Mesh(shard=4), precision="bf16"), num_ranks=8, batch=1)
    with pytest.raises(InvalidPlan, match="micro_batch = 0"):
        estimate(spec, plan=Plan(precision="bf16"), num_ranks=8, batch=0)


def test_the_peak_grows_with_the_batch_and_never_faster_than_in_proportion() -> None:
    spec = spec_for("vit-base")
    peaks = [
        estimate(spec, plan=Plan(precision="bf16"), num_ranks=8, batch=batch, quick=True).allocated_bytes
        for batch in (1, 2, 4, 8, 16)
    ]
    assert peaks == sorted(peaks)
    assert all(twice <= 2 * once for once, twice in itertools.pairwise(peaks))


@pytest.mark.parametrize("strategy", ["ddp", "shard_grad_op", "fsdp"])
def test_torchs_engines_are_replayed_without_a_trace(strategy: str) -> None:
    found = estimate(states_only("params:350m"), plan=Plan(strategy=strategy, engine="torch"), num_ranks=8, batch=1)
    assert sum(found.breakdown_bytes.values()) == found.allocated_bytes
    assert bool(found.breakdown_bytes["gathered"]) is (strategy != "ddp")


def test_ddp_reserves_no_buckets_for_frozen_parameters() -> None:
    def frozen(unit: UnitSpec) -> UnitSpec:
        return replace(unit, params=tuple(replace(param, trainable=False) for param in unit.params))

    plan = Plan(strategy="ddp", engine="torch", precision="bf16")
    spec = spec_for("gpt2-124m", plan)
    adapted = replace(spec, units=tuple(frozen(unit) if unit.name != "blocks.0" else unit for unit in spec.units))
    predicted = estimate(adapted, plan=plan, num_ranks=2, batch=1)
    # A bucket's place for each of the frozen ones would add them all.
    frozen_bytes = sum(4 * unit.num_params for unit in spec.units if unit.name != "blocks.0")
    assert predicted.reserved_bytes - predicted.allocated_bytes < 0.8 * frozen_bytes


def test_a_single_unit_that_is_gathered_needs_the_communicator_of_gathers() -> None:
    fsdp = Plan(precision="bf16")
    plans = (
        fsdp,
        Plan(precision="bf16", strategy="ddp", overrides={"blocks.3": "fsdp"}),
        replace(fsdp, strategy="ddp"),
    )
    spec = spec_for("gpt2-124m", *plans)
    outside = []
    for plan in plans:
        found = estimate(spec, plan=plan, num_ranks=8, batch=1)
        outside.append(found.device_bytes - found.reserved_bytes)
    assert outside[0] == outside[1] > outside[2]
