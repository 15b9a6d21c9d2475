"""Layers that multiply in fp8 are traced as the engine runs them, and their memory is what an H200 measured."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion
from whole import whole

from shardwise.models.reference import Model
from shardwise.models.shapes import LlamaShape
from shardwise.models.specs.traced import trace_task
from shardwise.models.tasks import token_task
from shardwise.models.trace.fp8 import fp8_layers
from shardwise.plan import Plan
from shardwise.planner.memory.peak import estimate
from shardwise.planner.ways import fp8_traces, fp8_way
from shardwise.program.buffers import fp8_weight_names
from shardwise.program.spec.step import GATHERED, ROWWISE, TENSORWISE
from shardwise.program.units import model_spec

MEASURED = Path(__file__).parents[4] / "benchmarks" / "results" / "fp8_h200.json"
SHAPE = LlamaShape(
    num_layers=3, width=128, num_heads=4, num_kv_heads=2, ffn_width=256, vocab_size=256, max_seq=64, vocab_multiple=1
)
FP8 = {"precision": "fp8", "fp8_min_features": 64}


# Measured with torch 2.11. Where one scale serves a tensor, the compiler of torch 2.14 and later saves the scale in place of the
# input that was cast to fp8, and casts it again in backward: of three products per layer.
CASTS_AGAIN = torch.__version__ >= TorchVersion("2.14")
NOT_SAVED = 32 * 3 * (8192 * 4096 + 512)


def measured_on_an_h200(case: str, recipe: str) -> int:
    rows = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
    return int(next(row for row in rows if row["case"] == case)["peak_bytes"][recipe])


@pytest.mark.parametrize(
    ("case", "seq", "batch", "recipe"),
    whole(("Llama-8B 1×8192", 8192, 1, "tensorwise"), ("Llama-8B 1×8192", 8192, 1, "rowwise")),
)
def test_compiled_units_in_fp8_take_what_was_measured(case: str, seq: int, batch: int, recipe: str) -> None:
    plan = Plan(precision="fp8", fp8_recipe=recipe, compile="inductor", capture="off")
    found = estimate(Model("llama-3.1-8b", seq=seq).spec_for(plan), plan=plan, num_ranks=8, batch=batch)
    expected = measured_on_an_h200(case, recipe) - CASTS_AGAIN * NOT_SAVED * (recipe == "tensorwise")
    assert found.allocated_bytes == pytest.approx(expected, rel=0.003)


@pytest.mark.parametrize(
    ("recipe", "computes_in"), [("tensorwise", GATHERED), ("tensorwise", TENSORWISE), ("rowwise", ROWWISE)]
)
def test_every_product_of_a_layer_is_an_fp8_product_of_the_device(recipe: str, computes_in: str) -> None:
    task = token_task(SHAPE, device="meta")
    plan = Plan(strategy="ddp" if computes_in == TENSORWISE else "fsdp", fp8_recipe=recipe, **FP8)
    bare = model_spec(task.model, name="llama")
    assert {way for way, _ in fp8_traces(bare, plan=plan)} == {computes_in}
    names = fp8_weight_names(bare, plan=plan)
    found = trace_task(task, name="llama", ways=[(computes_in, "none")], fp8=names)
    (trace,) = found.traces
    rows = [row for row in trace.rows if row.unit == "blocks.1"]
    products = [op.name for row in rows for op in row.stream.ops if op.name in ("mm", "addmm", "_scaled_mm")]
    assert products == ["_scaled_mm"] * 3 * 7
    # The model is as before.
    assert all(type(part) is not nn.Linear or part._buffers == {} for part in task.model.modules())
    assert model_spec(task.model, name="llama") == bare


def test_frozen_weights_are_cast_by_their_layers() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].weight.requires_grad_(requires_grad=False)
    with fp8_layers(model, weights=["0.weight", "1.weight"], computes_in=GATHERED, device="cpu"):
        assert [hasattr(part, "fp8_weight") for part in model] == [False, True]
    assert [type(part) for part in model] == [nn.Linear, nn.Linear]
    assert not model._non_persistent_buffers_set


def test_units_that_the_plan_keeps_in_bf16_are_predicted_in_bf16() -> None:
    """Also one in the middle of equal ones, which then stand for themselves alone."""
    shape_of: dict[str, Any] = {"num_ranks": 2, "batch": 8, "quick": True}
    task = token_task(replace(SHAPE, num_layers=16), device="meta")
    bare = trace_task(task, name="llama", ways=[("bf16", "none")])

    def peak(**options: Any) -> int:
        plan = Plan(**options)
        in_fp8 = trace_task(task, name="llama", ways=fp8_traces(bare, plan=plan), fp8=fp8_weight_names(bare, plan=plan))
        spec = replace(bare, traces=bare.traces + in_fp8.traces)
        assert [bool(fp8_way(unit, plan=plan)) for unit in spec.units[1:]] == [
            plan.has_fp8 and not plan.keeps_bf16(f"{unit.name}.attention.q.weight") for unit in spec.units[1:]
        ]
        return estimate(spec, plan=plan, **shape_of).allocated_bytes

    plain, all_of_them = peak(precision="bf16"), peak(**FP8)
    each = [peak(**FP8, keep_bf16=kept) for kept in (("blocks.3",), ("blocks.0", "blocks.5"))]
    assert all_of_them < each[0] < each[1] < plain
    assert each[1] - all_of_them == 2 * (each[0] - all_of_them)


def test_a_cpu_trace_emulates_the_products() -> None:
    task = token_task(SHAPE, device="meta")
    bare = model_spec(task.model, name="llama")
    names = fp8_weight_names(bare, plan=Plan(**FP8))
    found = trace_task(task, name="llama", ways=[(GATHERED, "none")], kernels="cpu", fp8=names)
    ops = {op.name for row in found.traces[0].rows for op in row.stream.ops}
    assert "_scaled_mm" not in ops
    assert "mm" in ops
