"""`strategy = "auto"`: the solver finds what trying everything finds, and never takes a plan that does not fit."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from planned_specs import spec_for
from random_models import PLAN, RandomModel, random_model

from shardwise.base.errors import InvalidPlan
from shardwise.base.vocabulary.quantities import GIB
from shardwise.hardware import Cluster, cluster_of
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh
from shardwise.planner.search.auto import Solved, solve_plan
from shardwise.planner.search.candidates import Candidate, candidates, cost
from shardwise.planner.search.dial import Dial
from shardwise.planner.search.dial_cost import DialCosts
from shardwise.planner.search.micro_batches import MicroBatches
from shardwise.planner.search.request import RECOMPUTES, AutoRequest, NoPlanFits
from shardwise.planner.search.reserved_search import _shrunk
from shardwise.program.spec import ModelSpec

SHARES = (0.1, 0.3, 0.5, 0.8)
GIBI = int(GIB.size)


def solved_with(model: RandomModel, *, limit: float) -> Solved:
    budget = round(limit * (1 + model.costs().band)) + 1
    plan = replace(PLAN, micro_batch=model.batch)
    request = AutoRequest(plan=plan, cluster=model.cluster, budget_bytes=budget, rows=model.rows, quick=True)
    return solve_plan(lambda *plans: model.spec, request=request)


def check_against_all(seed: int) -> None:
    model = random_model(seed)
    costs = model.costs()
    every = [(costs.tensor_bytes(dial), costs.speed(dial)) for dial in model.dials()]
    least, most = min(every)[0], max(every)[0]
    for share in SHARES:
        limit = least + share * (most - least)
        best = max(speed for num_bytes, speed in every if num_bytes <= limit)
        found = solved_with(model, limit=limit).candidate
        assert found.fits == "yes"
        assert found.time is not None
        assert found.time.samples_per_s >= 0.99 * best, (seed, share)


def test_the_solver_is_within_a_hundredth_of_trying_every_plan() -> None:
    check_against_all(5)


@pytest.mark.whole
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(50))
def test_the_solver_is_within_a_hundredth_on_50_models_at_4_budgets_each(seed: int) -> None:
    check_against_all(seed)


@cache
def traced(name: str) -> ModelSpec:
    return spec_for(name, *(Plan(precision="bf16", recompute=recompute) for recompute in RECOMPUTES))


def llama() -> ModelSpec:
    return traced("llama-3.1-8b")


def gpt() -> ModelSpec:
    return traced("gpt2-1.5b")


def solve(spec: ModelSpec, cluster: str | Cluster, *, plan: Plan = PLAN, **options: object) -> Solved:
    where = cluster_of(cluster) if isinstance(cluster, str) else cluster
    request = AutoRequest(plan=plan, cluster=where, **options)  # type: ignore[arg-type]
    return solve_plan(lambda *plans: spec, request=request)


@cache
def llama_in_60_gib(*, compiled: str) -> Candidate:
    """On 8 H100."""
    plan = replace(PLAN, compile=compiled, micro_batch=1)
    return solve(llama(), "8xh100-80gb", budget_bytes=60 * GIBI, plan=plan, quick=True).candidate


def test_equal_blocks_get_unequal_choices() -> None:
    found = llama_in_60_gib(compiled="none")
    ways = {found.plan.recompute_of(f"blocks.{number}") for number in range(32)}
    assert len(ways) == 2
    assert found.fits == "yes"


@pytest.mark.parametrize("gib", [25])
def test_no_plan_of_one_strategy_and_one_recompute_is_faster(gib: int) -> None:
    spec = gpt()
    found = solve(spec, "8xa100-40gb", budget_bytes=gib * GIBI, quick=True).candidate
    assert found.time is not None
    assert found.memory.device_bytes * (1 + found.memory_band) <= gib * GIBI
    for recompute in RECOMPUTES:
        fixed = candidates(
            lambda *plans: spec,
            plan=replace(PLAN, recompute=recompute),
            strategies=("ddp", "zero1", "zero2", "shard_grad_op", "fsdp"),
            cluster=found.cluster,
            optimizer="adamw",
            goal="throughput",
            quick=True,
        )
        for one in fixed:
            assert one.time is not None
            assert one.fits != "yes" or one.time.samples_per_s <= 1.003 * found.time.samples_per_s


@pytest.mark.parametrize("quick", [True, False])
def test_a_plan_is_never_behind_one_of_one_strategy_wherever_it_is_chosen(
    quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the solver had looked at one micro-batch of each, or at none that fits."""
    spec, cluster = gpt(), cluster_of("4xa100-40gb")
    fixed = candidates(
        lambda *plans: spec,
        plan=PLAN,
        strategies=("ddp", "zero1", "zero2", "shard_grad_op", "fsdp"),
        cluster=cluster,
        optimizer="adamw",
        goal="throughput",
        quick=quick,
        recomputes=RECOMPUTES,
    )
    best = max(one.samples_per_s for one in fixed if one.fits == "yes")

    def behind(spec_for: Any, *, request: AutoRequest) -> Solved:
        plan = replace(request.plan, strategy="fsdp", recompute="full", mesh=Mesh(shard=4), micro_batch=1)
        return Solved(candidate=cost(spec, plan=plan, cluster=cluster, optimizer="adamw"), num_replays=1)

    def nothing(spec_for: Any, *, request: AutoRequest) -> Solved:
        raise NoPlanFits("none")

    for found in (behind, nothing):
        monkeypatch.setattr("shardwise.planner.search.auto._solved", found)
        assert solve(spec, cluster, quick=quick).candidate.samples_per_s == best


def test_the_plan_in_its_file_is_the_plan_that_was_costed(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = llama_in_60_gib(compiled="none")
    assert found.plan.recompute_overrides
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    found.plan.save(path)
    again = cost(llama(), plan=Plan.load(path), cluster=found.cluster, optimizer="adamw", quick=True)
    assert again.memory == found.memory
    assert again.time == found.time


COMPILES = replace(PLAN, compile="auto", micro_batch=1)


def test_units_are_compiled_where_that_is_left_to_the_solver_and_pays() -> None:
    compiled, plain = llama_in_60_gib(compiled="auto"), llama_in_60_gib(compiled="none")
    assert (compiled.plan.compile, plain.plan.compile) == ("inductor", "none")
    assert compiled.fits == "yes"
    assert compiled.time is not None
    assert plain.time is not None
    assert compiled.time.samples_per_s > 1.05 * plain.time.samples_per_s


def test_units_are_not_compiled_where_it_does_not_pay_or_time_is_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert solve(llama(), "8xcpu", plan=COMPILES).candidate.plan.compile == "none"
    monkeypatch.setattr("shardwise.planner.search.compile_choice._WORTH_COMPILING", 3.0)
    found = solve(llama(), "8xh100-80gb", budget_bytes=60 * GIBI, plan=COMPILES, quick=True).candidate
    assert found.plan == llama_in_60_gib(compiled="none").plan


def test_a_global_batch_is_met_whatever_the_micro_batch() -> None:
    found = solve(gpt(), "8xa100-40gb", global_batch=32, quick=True).candidate
    assert found.global_batch == 32
    assert found.fits == "yes"
    with pytest.raises(InvalidPlan, match="must be a multiple of 8"):
        solve(gpt(), "8xh100-80gb", global_batch=100)
    with pytest.raises(InvalidPlan, match="micro_batch = 3 does not divide"):
        solve(gpt(), "8xh100-80gb", global_batch=128, plan=replace(PLAN, micro_batch=3))


def test_for_memorys_sake_nothing_is_smaller() -> None:
    spec = llama()
    found = solve(spec, "8xh100-80gb", goal="memory").candidate
    fixed = cost(
        spec,
        plan=replace(PLAN, recompute="full", micro_batch=1),
        cluster=cluster_of("8xh100-80gb"),
        optimizer="adamw",
    )
    assert found.memory.allocated_bytes <= fixed.memory.allocated_bytes


def test_states_go_to_the_host_only_if_nothing_else_fits() -> None:
    spec = llama()
    one = replace(PLAN, micro_batch=1)
    assert not solve(spec, "8xh100-80gb", budget_bytes=35 * GIBI, plan=one, quick=True).candidate.plan.offload_states
    found = solve(spec, "2xh100-80gb", budget_bytes=60 * GIBI, plan=one, quick=True).candidate
    assert found.plan.offload_states or found.plan.offload_activations
    assert found.fits == "yes"


def test_what_is_needed_at_least_counts_host_memory() -> None:
    spec, on = llama(), replace(PLAN, micro_batch=1)
    with pytest.raises(NoPlanFits) as caught:
        solve(spec, "2xh100-80gb", budget_bytes=4 * GIBI, plan=on, quick=True)
    needed = float(str(caught.value).partition("the smallest needs ")[2].partition(" GiB")[0])
    found = solve(spec, "2xh100-80gb", budget_bytes=round(1.01 * needed * GIBI), plan=on, quick=True).candidate
    assert found.plan.offload_states


def test_states_that_one_rank_owns_do_not_go_to_the_host() -> None:
    owned = replace(PLAN, micro_batch=1, owned=("blocks.*",))
    with pytest.raises(NoPlanFits):
        solve(llama(), "8xh100-80gb", budget_bytes=4 * GIBI, plan=owned, quick=True)


def test_states_are_updated_inside_backward_where_that_is_left_to_the_solver_and_faster() -> None:
    spec, either = llama(), replace(PLAN, micro_batch=1, update="auto")

    def speed(update: str) -> float:
        plan = replace(either, update=update)
        return solve(spec, "2xh100-80gb", budget_bytes=45 * GIBI, plan=plan, quick=True).candidate.samples_per_s

    found = solve(spec, "2xh100-80gb", budget_bytes=45 * GIBI, plan=either, quick=True).candidate
    assert found.plan.update == "backward"
    assert found.samples_per_s == speed("backward") > 1.1 * speed("step")
    by_step, smallest = (
        solve(spec, "2xh100-80gb", plan=replace(either, update=update), goal="memory", quick=True).candidate.memory
        for update in ("step", "auto")
    )
    assert smallest.device_bytes < by_step.device_bytes
    # Memory is not short; what one rank owns is stepped whole; fp16 needs its scaler.
    roomy = solve(spec, "8xh100-80gb", plan=either, quick=True).candidate
    assert roomy.plan.update == "step"
    for settings in ({"owned": ("blocks.*.wq.weight",)}, {"precision": "fp16"}):
        plan = replace(either, **settings)
        short = solve(spec, "8xh100-80gb", budget_bytes=30 * GIBI, plan=plan, quick=True).candidate
        assert short.plan.update == "step"


def test_what_cannot_fit_is_one_line_with_what_it_would_need() -> None:
    with pytest.raises(NoPlanFits, match=r"no plan for 8xh100-80gb fits into 4.00 GiB.*the smallest needs") as caught:
        solve(llama(), "8xh100-80gb", budget_bytes=4 * GIBI)
    assert len(str(caught.value).splitlines()) == 1


def test_where_time_is_not_predicted_the_simplest_that_fits_is_taken() -> None:
    spec = Model("gpt2-124m", kernels="cuda").spec_for(Plan())
    found = solve_plan(
        lambda *plans: spec,
        request=AutoRequest(plan=Plan(micro_batch=1), cluster=cluster_of("4xcpu"), recomputes=("none",)),
    ).candidate
    assert (found.plan.strategy, found.plan.recompute, found.time) == ("ddp", "none", None)


def test_an_auto_plan_is_not_yet_a_plan() -> None:
    with pytest.raises(InvalidPlan, match=r"the plan is not chosen yet; shardwise\.Plan\.auto"):
        Plan(strategy="auto").placements(["(root)"])
    with pytest.raises(InvalidPlan, match="leave overrides"):
        Plan(strategy="auto", overrides={"head": "ddp"})


@pytest.mark.parametrize("largest", [200, 191, 20, 1, 0])
def test_a_dial_gives_up_about_as_many_samples_as_the_allocator_asks_for(largest: int) -> None:
    """Also where the tensors need hardly more with each sample, and the allocator much more."""
    dial = Dial(
        root="ddp", choices=(), mesh=Mesh(shard=1), prefetch=1, batch=200, accumulate=1, accumulate_reduced=False
    )
    costs = SimpleNamespace(
        tensor_bytes=lambda dial: 10**9 + dial.batch,
        device_bytes=lambda dial, limit_bytes: limit_bytes + 10**6 * (dial.batch - largest),
    )
    solver: Any = SimpleNamespace(costs=costs, batches=MicroBatches())
    shrunk = _shrunk(dial, solver=solver, limit=2 * 10**9)
    batch = shrunk.batch if shrunk is not None else 0
    assert batch <= largest
    assert batch == pytest.approx(largest, rel=0.02)
    fixed: Any = SimpleNamespace(costs=costs, batches=MicroBatches(micro_batch=200))
    assert (_shrunk(dial, solver=fixed, limit=2 * 10**9) is None) == (largest < 200)


def test_a_plan_of_one_choice_is_found_where_the_holes_of_every_mixture_are_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not one that keeps activations in host memory, of which nobody knows how slow it is."""
    real = DialCosts.device_bytes

    def with_holes(costs: DialCosts, dial: Dial, *, limit_bytes: float) -> int:
        holes = 0 if len(set(dial.choices)) == 1 else 100 * GIBI
        return real(costs, dial, limit_bytes=limit_bytes) + holes

    monkeypatch.setattr(DialCosts, "device_bytes", with_holes)
    found = solve(llama(), "8xh100-80gb", budget_bytes=45 * GIBI).candidate
    assert not found.plan.offload_activations
    assert not found.plan.offload_states
    assert not found.plan.recompute_overrides
