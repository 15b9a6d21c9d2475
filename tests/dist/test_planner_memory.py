"""What the planner predicts is what a run takes: our engine on CPUs, tensor by tensor."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from step_memory import alike_ranks, step_bytes
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from whole import whole

from shardwise.comm.job.absent import absent_group
from shardwise.engine.activations.tiled import tile_modules
from shardwise.engines import prepare
from shardwise.models.shapes import GPTShape, LlamaShape, ResNetShape, Shape, ViTShape
from shardwise.models.specs.traced import trace_task
from shardwise.models.tasks import Task, image_task, token_task
from shardwise.models.trace.observe import Way
from shardwise.models.trace.trace import trace_model
from shardwise.plan import Plan
from shardwise.plan.patterns import Patterns
from shardwise.plan.placement import STRATEGIES, Mesh
from shardwise.planner import MemoryEstimate, estimate
from shardwise.planner.ways import fp8_traces, traced_ways
from shardwise.program.buffers import fp8_weight_names
from shardwise.program.spec import ModelSpec
from shardwise.program.units import model_spec

SHAPES: dict[str, tuple[Shape, int]] = {
    "gpt": (GPTShape(num_layers=3, width=64, num_heads=4, vocab_size=250, max_seq=32), 4),
    "llama": (
        LlamaShape(num_layers=3, width=64, num_heads=4, num_kv_heads=2, ffn_width=192, vocab_size=256, max_seq=32),
        4,
    ),
    "vit": (
        ViTShape(num_layers=3, width=64, num_heads=4, image_size=8, patch_size=2, num_channels=1, num_classes=10),
        8,
    ),
    "resnet": (
        ResNetShape(
            block="basic",
            num_blocks=(1, 2, 1, 1),
            width=8,
            image_size=8,
            num_channels=1,
            num_classes=10,
            small_images=True,
        ),
        64,
    ),
}
# Most of its memory is needed at the end of backward, for the gradients of the head.
SHAPES["llama with a large head"] = (
    LlamaShape(num_layers=6, width=64, num_heads=4, num_kv_heads=2, ffn_width=192, vocab_size=3000, max_seq=8),
    1,
)
SHAPES["gpt mixed"] = SHAPES["gpt adapted"] = SHAPES["gpt"]
"""As an adapter trains: in each block a few small parameters, beside large ones that are frozen; at the root none.
`adapted`: the frozen ones are in bf16."""
_ADAPTED = ("norm1", "attention.out")


def task_of(name: str, *, device: str) -> Task:
    shape, _ = SHAPES[name]
    if not isinstance(shape, GPTShape | LlamaShape):
        return image_task(shape, device=device)
    task = token_task(shape, device=device)
    if name.endswith((" mixed", " adapted")):
        for path, parameter in task.model.named_parameters():
            parameter.requires_grad_(any(part in path for part in _ADAPTED))
            if name.endswith(" adapted") and not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
    return task


@cache
def spec_of(name: str, precision: str, recompute: str, tile: Patterns[int], units: str) -> ModelSpec:
    """Traced as it is, and as it is recomputed."""
    task = task_of(name, device="meta")
    tile_modules(task.model, tile=tile, verifies=False)
    ways = [Way(computes_in=precision, recompute=how, device="cpu") for how in dict.fromkeys(("none", recompute))]
    return trace_model(task.model, loss=task.loss, make_batch=task.make_batch, name=name, policy=units, ways=ways)


def spec_in_fp8(name: str, plan: Plan) -> ModelSpec:
    """Traced with the plan's layers in fp8 as well."""
    bare = model_spec(task_of(name, device="meta").model, name=name)
    weights = fp8_weight_names(bare, plan=plan)
    specs = [_traced(name, ("bf16", how), frozenset()) for how in traced_ways(bare, plan=plan)]
    specs += [_traced(name, way, weights) for way in fp8_traces(bare, plan=plan)]
    return replace(specs[0], traces=tuple(trace for spec in specs for trace in spec.traces))


@cache
def _traced(name: str, way: tuple[str, str], fp8: frozenset[str]) -> ModelSpec:
    return trace_task(task_of(name, device="meta"), name=name, ways=[way], kernels="cpu", fp8=fp8)


def measured(rank: int, name: str, plans: list[Plan]) -> list[tuple[int, int]]:
    """(peak of a step, what is left after it) of each plan."""
    with alike_ranks():
        return [_measure(name, plan) for plan in plans]


def _measure(name: str, plan: Plan) -> tuple[int, int]:
    return step_bytes(partial(task_of, name, device="cpu"), plan=plan, batch=SHAPES[name][1])


def rehearsed(rank: int, name: str, plans: list[Plan], num_ranks: int) -> list[tuple[int, int]]:
    """As `measured`, on torch's fake backend: Gloo makes copies for torch's engines, and frees them unseen."""
    dist.destroy_process_group()
    with absent_group(num_ranks):
        return measured(rank, name, plans)


def check(name: str, plans: list[Plan], *, num_ranks: int) -> None:
    """Compare what rank 0 of `num_ranks` takes, the others of which are absent: one process computes, not all."""
    compare(name, plans, run_ranks(rehearsed, num_ranks=1, args=(name, plans, num_ranks))[0], num_ranks=num_ranks)


def check_ranks(name: str, plans: list[Plan], *, num_ranks: int) -> None:
    """Compare with ranks that are all there."""
    compare(name, plans, run_ranks(measured, num_ranks=num_ranks, args=(name, plans))[0], num_ranks=num_ranks)


def predict(name: str, plan: Plan, *, num_ranks: int) -> MemoryEstimate:
    if plan.has_fp8:
        spec = spec_in_fp8(name, plan)
    else:
        spec = spec_of(name, plan.precision, plan.recompute, Patterns(plan.tile), plan.units)
    return estimate(
        spec,
        plan=plan,
        num_ranks=num_ranks,
        batch=SHAPES[name][1],
        optimizer="adamw-loop",
        device="cpu",
    )


def compare(name: str, plans: list[Plan], results: list[tuple[int, int]], *, num_ranks: int) -> None:
    for plan, (peak, rest) in zip(plans, results, strict=True):
        predicted = predict(name, plan, num_ranks=num_ranks)
        what = (name, plan.strategy, plan.precision, plan.recompute, predicted.peak_at, predicted.breakdown_bytes)
        # On a CPU, host memory is counted as well.
        assert predicted.allocated_bytes + predicted.host_bytes == pytest.approx(peak, rel=0.01), what
        # Not in an accumulation, where it is what the last pass begins with, nor where updates in host memory still hold
        # gradients.
        if plan.accumulate == 1 and not plan.offload_states:
            assert predicted.at_rest_bytes == pytest.approx(rest, rel=0.01), what


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("gpt", 2),
        *whole(("llama", 2), ("vit", 2), ("resnet", 2), *((name, 1) for name in ("gpt", "llama", "vit", "resnet"))),
    ],
)
def test_the_peak_of_every_strategy_is_predicted_to_a_hundredth(name: str, num_ranks: int) -> None:
    check_ranks(name, [Plan(strategy=strategy) for strategy in STRATEGIES], num_ranks=num_ranks)


@pytest.mark.parametrize("num_ranks", [2, *whole(1)])
def test_and_where_units_hold_frozen_parameters_too(num_ranks: int) -> None:
    check("gpt mixed", [Plan(strategy=strategy) for strategy in STRATEGIES], num_ranks=num_ranks)


def test_in_bf16_too() -> None:
    # Few, because some CPUs have no bf16, and take long.
    check("gpt", [Plan(strategy="fsdp", precision="bf16")], num_ranks=1)


@pytest.mark.parametrize(
    ("recipe", "recompute"), [("tensorwise", "none"), *whole(("tensorwise", "full"), ("rowwise", "none"))]
)
def test_in_fp8_the_copies_and_casts_of_its_layers_are_predicted(recipe: str, recompute: str) -> None:
    fp8 = {"precision": "fp8", "fp8_recipe": recipe, "fp8_min_features": 16, "recompute": recompute}
    plans = [
        *(Plan(strategy=strategy, **fp8) for strategy in ("ddp", "zero2", "fsdp")),
        Plan(overrides={"blocks.1": "ddp"}, keep_bf16=("blocks.2",), **fp8),
    ]
    check("llama", plans, num_ranks=2)


@pytest.mark.parametrize(("name", "recompute"), [("llama", "selective"), *whole(("gpt", "full"), ("resnet", "full"))])
def test_and_with_recomputation(name: str, recompute: str) -> None:
    plans = [Plan(strategy=strategy, recompute=recompute) for strategy in ("ddp", "fsdp")]
    check(name, plans, num_ranks=2)


@pytest.mark.parametrize("plan", [Plan(recompute="full"), *whole(Plan(strategy="ddp"), Plan())])
def test_and_of_modules_in_tiles(plan: Plan) -> None:
    check("gpt", [replace(plan, tile={"*.feed_forward": 8})], num_ranks=2)


@pytest.mark.parametrize("units", ["leaf", *whole("none", "blocks", "class:Block + head", "min-params:20000")])
def test_and_where_the_model_is_cut_otherwise(units: str) -> None:
    check("llama", [Plan(strategy=strategy, units=units) for strategy in ("zero2", "fsdp")], num_ranks=2)


def test_and_where_units_differ() -> None:
    plans = [
        Plan(overrides={"blocks.0": "shard_grad_op", "blocks.2": "ddp"}, prefetch=2),
        Plan(recompute="full", recompute_overrides={"blocks.1": "none"}, reduces_in_flight=2),
        Plan(strategy="ddp", bucket_bytes=1),
        Plan(piece_bytes=4000),
        Plan(strategy="zero2", piece_bytes=4000, reduces_in_flight=2),
    ]
    check("gpt", plans, num_ranks=2)


def test_and_where_updates_of_states_in_host_memory_hold_gradients_until_backward_ends() -> None:
    # Backward comes to the four blocks on the host first; gradients of the last two of them are held during the others.
    on_host = ("blocks.[2-5]",)
    plans = [Plan(recompute="full", offload_states=on_host, update=update) for update in ("step", "backward")]
    check("llama with a large head", plans, num_ranks=1)


@pytest.mark.parametrize("num_ranks", [2, *whole(1)])
def test_and_of_torchs_own_engines(num_ranks: int) -> None:
    plans = [Plan(strategy=strategy, engine="torch") for strategy in ("ddp", "shard_grad_op", "fsdp")]
    check("llama", plans, num_ranks=num_ranks)


@pytest.mark.parametrize("accumulate", [1, *whole(3)])
def test_and_of_torchs_own_where_the_embedding_and_the_head_are_units(accumulate: int) -> None:
    """Reduces of units that are one parameter hold its gradient as well; the embedding's is the last one."""
    cut = {"units": "class:Block + embed + head", "accumulate": accumulate}
    plans = [Plan(strategy=strategy, engine="torch", **cut) for strategy in ("fsdp", "shard_grad_op")]
    check("llama with a large head", plans, num_ranks=4)


@pytest.mark.parametrize("strategy", ["fsdp", *whole("shard_grad_op")])
def test_and_of_a_base_that_is_frozen_in_bf16(strategy: str) -> None:
    """It stays in bf16 on torch's engine too; only what is trained has a master in fp32."""
    plans = [Plan(strategy=strategy, engine="torch", precision="bf16")]
    check("gpt adapted", plans, num_ranks=2)


@pytest.mark.parametrize("num_ranks", [4, *whole(1)])
@pytest.mark.parametrize("engine", ["shardwise", "torch"])
def test_and_of_several_passes(engine: str, num_ranks: int) -> None:
    strategies = ("ddp", "shard_grad_op", "fsdp") if engine == "torch" else STRATEGIES
    plans = [Plan(strategy=strategy, engine=engine, accumulate=3) for strategy in strategies]
    check("gpt", plans, num_ranks=num_ranks)


def test_slices_that_are_under_way_over_a_second_axis_are_predicted_to_the_byte() -> None:
    # Here a slice is all of a unit, and most is held when backward comes to the first block.
    plans = [Plan(mesh=Mesh(replicate=4), reduce_dtype=dtype, recompute="full") for dtype in ("fp32", "bf16")]
    results = run_ranks(rehearsed, num_ranks=1, args=("resnet", plans, 4))[0]
    compare("resnet", plans, results, num_ranks=4)
    in_fp32, in_bf16 = (predict("resnet", plan, num_ranks=4) for plan in plans)
    assert in_fp32.peak_at == in_bf16.peak_at == "before backward layer1.0"
    assert in_fp32.allocated_bytes - in_bf16.allocated_bytes == results[0][0] - results[1][0]


def test_the_peak_of_states_over_all_ranks_is_predicted_to_a_hundredth() -> None:
    """Of 8 ranks, and of one of 64; in an accumulation, whose passes keep slices, too."""
    ways = [
        {"across": "zero1"},
        {"across": "zero2", "piece_bytes": 4000},
        {"across": "zero1", "accumulate": 3, "recompute": "full"},
        {"across": "zero2", "accumulate": 3, "reduce_dtype": "bf16"},
        {"across": "zero2", "accumulate": 3, "accumulate_reduced": True, "strategy": "shard_grad_op"},
        {"across": "zero2", "precision": "bf16", "overrides": {"blocks.1": "ddp"}},
    ]
    check("gpt", [Plan(mesh=Mesh(replicate=4, shard=2), **way) for way in ways], num_ranks=8)  # type: ignore[arg-type]
    large = [Plan(mesh=Mesh(replicate=8, shard=8), **way) for way in ways[:4]]  # type: ignore[arg-type]
    check("llama with a large head", large, num_ranks=64)


def tracked(rank: int, name: str, plan: Plan, num_ranks: int) -> int:
    """The peak that torch's own tracker of fully_shard counts in a second step."""
    dist.destroy_process_group()
    with absent_group(num_ranks):
        task = task_of(name, device="cpu")
        optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-3, foreach=False)
        model, optimizer = prepare(task.model, optimizer, plan)
        batch = task.make_batch(SHAPES[name][1])
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((batch,))
        with tracker:
            for _ in range(2):
                tracker.reset_mod_stats()
                task.loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.parametrize(("strategy", "name", "num_ranks"), [("fsdp", "llama", 8), ("shard_grad_op", "gpt", 2)])
def test_torchs_own_tracker_counts_the_same_bytes(strategy: str, name: str, num_ranks: int) -> None:
    plan = Plan(strategy=strategy, engine="torch")
    predicted = predict(name, plan, num_ranks=num_ranks)
    assert run_ranks(tracked, num_ranks=1, args=(name, plan, num_ranks)) == [predicted.allocated_bytes]
