"""Long sequences: `auto` computes MLPs, the head and the loss in tiles where it would otherwise need host memory, or nothing would fit."""

from dataclasses import replace

import pytest
from whole import whole

from shardwise.hardware import cluster_of
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.planner.search.auto import costs_of, solve_for, solve_plan
from shardwise.planner.search.chosen_text import chosen_text
from shardwise.planner.search.request import AutoRequest, NoPlanFits
from shardwise.planner.search.tiles import tiles_of
from shardwise.program.spec import ModelSpec, TensorSpec, UnitSpec

PLAN = Plan(precision="bf16", strategy="auto", micro_batch=1, capture="off")


def test_where_nothing_else_fits_modules_compute_in_tiles() -> None:
    spec_for = Model("llama-tiny", seq=32768).spec_for
    # On one device all strategies hold about the same: one of them is a fifth of the search.
    ample = AutoRequest(plan=PLAN, cluster=cluster_of("1xh200"), rows=("fsdp",))
    assert not solve_plan(spec_for, request=ample).candidate.plan.tile
    request = replace(ample, budget_bytes=round(2.0 * 2**30))
    costs = costs_of(spec_for, request=request)
    with pytest.raises(NoPlanFits):
        solve_for(costs, request=request)
    found = solve_plan(spec_for, request=request).candidate
    assert found.fits == "yes"
    assert dict(found.plan.tile) == {"*.feed_forward": 8192}
    names = [unit.name for unit in costs.spec.units]
    assert "*.feed_forward in tiles of 8,192 tokens" in chosen_text(found.plan, names=names)


@pytest.mark.parametrize("model", whole("llama-3.2-1b"))
def test_tiles_take_the_place_of_recomputed_units_where_they_are_faster(model: str) -> None:
    spec_for = Model(model, seq=131072).spec_for
    request = AutoRequest(plan=PLAN, cluster=cluster_of("1xh200"), rows=("fsdp",))
    without = solve_for(costs_of(spec_for, request=request), request=request).candidate
    found = solve_plan(spec_for, request=request).candidate
    assert without.plan.recompute == "full"
    assert found.plan.tile
    assert found.samples_per_s > 1.05 * without.samples_per_s


def test_the_loss_of_a_tiled_head_is_that_of_its_tiles() -> None:
    plan = Plan(precision="bf16", tile={"head": 64})
    specs = [Model("llama-tiny", seq=256, loss=loss).spec_for(plan) for loss in ("lean", "usual")]
    assert specs[0].traces
    assert specs[0].traces == specs[1].traces


def spec_of(*names: str, seq: int | None = 65536, root: tuple[TensorSpec, ...] = ()) -> ModelSpec:
    params = tuple(TensorSpec(name=f"blocks.0.{name}", shape=(8, 8), dtype="float32") for name in names)
    units = (
        UnitSpec(name="(root)", class_name="Model", params=root),
        UnitSpec(name="blocks.0", class_name="Block", params=params),
    )
    return ModelSpec(name="model", units=units, call_order=("(root)", "blocks.0"), seq=seq)


HEAD = TensorSpec(name="model.lm_head.weight", shape=(150_000, 64))
TIED = TensorSpec(name="embed.weight", shape=(50_000, 64), aliases=("head.weight",))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (spec_of("attn.q.weight", "mlp.up.weight", "mlp.down.weight"), {"*.mlp": 8192}),
        (spec_of("mlp.up.weight", "mlp.down.weight", seq=524288), {"*.mlp": 65536}),
        (spec_of("mlp.gate.base.weight", "mlp.gate.lora.weight", "mlp.up.weight", "mlp.down.weight"), {"*.mlp": 8192}),
        (spec_of("mlp.up.weight", "mlp.down.weight", root=(HEAD,)), {"*.mlp": 8192, "model.lm_head": 1024}),
        (spec_of("attn.q.weight", root=(TIED,)), {"head": 4096}),
        (spec_of("attn.q.weight", root=(HEAD,), seq=1048576), {"model.lm_head": 16384}),
        (spec_of("attn.q.weight", root=(TensorSpec(name="head.weight", shape=(256, 64)),)), {}),
        # Experts, short samples, samples without a length.
        (spec_of("mlp.router.weight", *(f"mlp.experts{n}.weight" for n in range(4))), {}),
        (spec_of("mlp.up.weight", "mlp.down.weight", seq=8192), {}),
        (spec_of("mlp.up.weight", "mlp.down.weight", seq=None), {}),
    ],
)
def test_dense_modules_of_single_tokens_are_found_by_name(spec: ModelSpec, expected: dict[str, int]) -> None:
    assert tiles_of(spec, plan=PLAN) == expected
    assert tiles_of(spec, plan=replace(PLAN, tile={"*.other": 4096})) == {}
    assert tiles_of(spec, plan=Plan(engine="torch")) == {}
