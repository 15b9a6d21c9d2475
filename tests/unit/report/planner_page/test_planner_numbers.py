"""The page computes what the planner computes: the same bytes, and seconds to rounding, at random settings."""

import json
import random
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from report.chromium import CHROMIUM, page
from report.planner_page.page_settings import (
    ALL_MODELS,
    BATCHES,
    MODELS,
    NUMBERS_IN_PAGE,
    Settings,
    all_costs,
    numbers,
    one_cost,
    random_budget,
    random_settings,
    recommended,
)
from whole import whole

from shardwise.hardware.prices import prices
from shardwise.plan.mesh import Mesh
from shardwise.planner.search.candidates import capacity_bytes
from shardwise.planner.search.training_cost import training_cost
from shardwise.planner.search.way_out import ways_out
from shardwise.planner.time.step_time import timeline
from shardwise.report.planner_page.device_tables import hardware_data, offered_devices
from shardwise.report.planner_page.page_plans import HOSTS, WAYS
from shardwise.report.planner_page.planner_document import MODEL_SCRIPTS, catalogue_model, planner_page

NODE = shutil.which("node")
ONE = """
async ({ cases, plannerOf, numbers }) => {
  const found = [];
  for (const [settings, model, strategy, number] of cases) {
    const planner = await plannerOf(model), meshes = planner.meshes(strategy, planner.cluster(settings));
    found.push(numbers(planner.cost(strategy, meshes[number % meshes.length], settings, { quick: true })));
  }
  return found;
}
"""
ALL = """
async ({ cases, plannerOf, numbers }) => {
  const found = [];
  for (const [settings, model] of cases) {
    const planner = await plannerOf(model), all = planner.candidates(settings), best = planner.best(all);
    found.push([all.map(numbers), best && numbers(best.best)]);
  }
  return found;
}
"""
TIMELINE = """
async ({ cases, plannerOf }) => {
  const found = [];
  for (const [settings, model, strategy] of cases) {
    const planner = await plannerOf(model), one = planner.cost(strategy, { replicate: 1, shard: settings.count }, settings, { quick: true });
    const lanes = { compute: [0, 0], gather: [0, 0], reduce: [0, 0] };
    for (const [what, name, start, end] of planner.timeline(one, settings)) {
      const lane = lanes[what === stepTime.SENT ? name.split(" ")[0] : "compute"];
      lane[0] += end - start;
      lane[1] = Math.max(lane[1], end);
    }
    found.push(lanes);
  }
  return found;
}
"""
WAY_OUT = """
async ({ cases, plannerOf }) => {
  const found = [];
  for (const [settings, model] of cases) {
    const { change, best, isOffered } = (await plannerOf(model)).waysOut(settings).pop();
    found.push([change.count, change.recompute, best.device, isOffered]);
  }
  return found;
}
"""
TRAINING = """
async ({ cases, plannerOf }) => {
  const found = [];
  for (const [settings, model, strategy, training] of cases) {
    const planner = await plannerOf(model), mesh = { replicate: 1, shard: settings.count };
    const one = planner.trainingCost(planner.cost(strategy, mesh, settings, { quick: true }), settings, training);
    found.push([one.days, one.gpuHours, one.cost]);
  }
  return found;
}
"""
FRONTIER = """
async ({ cases, plannerOf }) => {
  const found = [];
  for (const [settings, model] of cases) {
    const planner = await plannerOf(model), speed = (one) => one && one.time.samplesPerSecond;
    found.push(planner.budgets(settings).map((budget) => [budget, speed(planner.fastest(settings, budget))]));
  }
  return found;
}
"""

Run = Callable[[str, list[Any]], Any]


known_model = cache(catalogue_model)


def models_of(cases: list[Any]) -> list[dict[str, Any]]:
    """The data of the models that are asked for: each case names one, after its settings."""
    return [known_model(name) for name in sorted({case[1] for case in cases})]


def in_chromium(script: str, cases: list[Any], *, folder: Path) -> Any:
    path = folder / "planner.html"
    start = {"model": cases[0][1], "device": "h100-80gb", "gpus": 8}
    path.write_text(planner_page(models_of(cases), start=start, server=None), encoding="utf-8")
    with page(path) as opened:
        given = f"cases: {json.dumps(cases)}, plannerOf: plannerPage.plannerOf, numbers: {NUMBERS_IN_PAGE}"
        found = opened.evaluate(f"({script})({{ {given} }})")
        assert opened.errors == []
    return found


def in_node(script: str, cases: list[Any], *, folder: Path) -> Any:
    assert NODE is not None
    source = files("shardwise.report.planner_page")
    texts = [source.joinpath(name).read_text(encoding="utf-8") for name in MODEL_SCRIPTS]
    data = {"hardware": hardware_data(offered_devices()), "models": models_of(cases), "cases": cases}
    (folder / "data.json").write_text(json.dumps(data))
    run = f"""
const data = JSON.parse(require("fs").readFileSync({json.dumps(str(folder / "data.json"))}, "utf8"));
const planners = new Map(data.models.map((model) => [model.name, new Planner(data.hardware, model)]));
({script})({{ cases: data.cases, plannerOf: async (name) => planners.get(name), numbers: {NUMBERS_IN_PAGE} }}).then((found) => console.log(JSON.stringify(found)));
"""
    (folder / "run.js").write_text("\n".join([*texts, run]))
    done = subprocess.run([NODE, str(folder / "run.js")], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a script in Chromium, or in node where there is none."""
    if CHROMIUM is not None:
        return lambda script, cases: in_chromium(script, cases, folder=tmp_path)
    if NODE is not None:
        return lambda script, cases: in_node(script, cases, folder=tmp_path)
    pytest.skip("neither chromium nor node on the path")


def check(shown: list[Any], expected: list[Any], *, at: object) -> None:
    *exact, rates = shown
    *exact_expected, rates_expected = expected
    assert exact == exact_expected, at
    assert rates == pytest.approx(rates_expected, rel=1e-9, abs=1e-12), at


@pytest.mark.parametrize(("rounds", "models"), [(1, MODELS), *whole((30, ALL_MODELS))])
def test_page_and_planner_agree_on_random_settings(rounds: int, models: tuple[str, ...], run: Run) -> None:
    rng = random.Random(20)
    # All strategies at one model, length and cluster, of which the planner computes some parts once.
    bases = [random_settings(rng, models=models, host=host) for _ in range(rounds) for host in HOSTS]
    asked = [
        (replace(base, batch=rng.choice(BATCHES), budget=random_budget(rng, base.device)), strategy, rng.randrange(3))
        for base in bases
        for strategy in base.strategies
    ]
    cases = [[settings.as_data(), settings.model, strategy, number] for settings, strategy, number in asked]
    shown = run(ONE, cases)
    for one, (settings, strategy, number) in zip(shown, asked, strict=True):
        check(one, numbers(one_cost(settings, strategy, number)), at=(settings, strategy, number))


@pytest.mark.parametrize(("rounds", "models"), [(1, MODELS), *whole((10, ALL_MODELS))])
def test_page_finds_the_same_micro_batches_and_recommends_the_same_plan(
    rounds: int, models: tuple[str, ...], run: Run
) -> None:
    """With the allocator's model, as `shardwise plan` does."""
    rng = random.Random(21)
    asked = [random_settings(rng, models=models, host=host, free_batch=True) for _ in range(rounds) for host in HOSTS]
    shown = run(ALL, [[settings.as_data(), settings.model] for settings in asked])
    for (all_shown, best_shown), settings in zip(shown, asked, strict=True):
        found = all_costs(settings)
        for one, candidate in zip(all_shown, found, strict=True):
            check(one, numbers(candidate), at=settings)
        best = recommended(settings, found)
        assert (best_shown is None) == (best is None), settings
        if best is not None:
            check(best_shown, numbers(best), at=settings)


def test_days_and_cost_of_the_page_are_the_planners(run: Run) -> None:
    settings = Settings(model="llama-3.1-70b", device="h200", count=8, recompute="full", seq=2048, batch=1)
    training = {"tokens": 2e9, "price": prices()["h200"].per_gpu_hour}
    [[days, gpu_hours, dollars]] = run(TRAINING, [[settings.as_data(), settings.model, "fsdp", training]])
    candidate = one_cost(settings, "fsdp", 0)
    expected = training_cost(candidate, num_tokens=2e9, price_per_gpu_hour=training["price"])
    assert expected is not None
    assert (days, gpu_hours, dollars) == pytest.approx((expected.days, expected.gpu_hours, expected.cost))


def test_timeline_of_the_page_is_as_long_as_the_planners(run: Run) -> None:
    """Also of many layers, of which the page times a few and repeats the rest."""
    settings = Settings(model="llama-3.1-70b", device="h200", count=8, recompute="full", seq=2048, batch=1)
    cases = [[settings.as_data(), settings.model, strategy] for strategy in ("ddp", "fsdp")]
    for shown, (_, _, strategy) in zip(run(TIMELINE, cases), cases, strict=True):
        plan = replace(settings.plan, strategy=strategy, mesh=Mesh(shard=8))
        spans = timeline(settings.spec, plan=plan, cluster=settings.cluster)
        for lane in ("compute", "gather", "reduce"):
            own = [span for span in spans if span.queue == lane]
            expected = [sum(span.end - span.start for span in own), max((span.end for span in own), default=0.0)]
            assert shown[lane] == pytest.approx(expected, rel=5e-3), (strategy, lane)


def test_frontier_of_the_page_is_that_of_fixed_plans(run: Run) -> None:
    settings = Settings(model="llama-3.1-70b", device="h200", count=16, recompute="none", seq=2048, batch=None)
    (shown,) = run(FRONTIER, [[settings.as_data(), settings.model]])
    assert [budget for budget, _ in shown][-1] == capacity_bytes(settings.cluster)
    assert shown[0][1] is None, "nothing fits into an eighth"
    for budget, speed in shown[-2:]:
        own = [
            one
            for way in WAYS
            for one in all_costs(replace(settings, recompute=way, budget=budget), quick=True)
            if one.fits == "yes"
        ]
        assert (speed is None) == (not own)
        if own:
            assert speed == pytest.approx(max(one.time.samples_per_s for one in own if one.time is not None), rel=1e-9)


@pytest.mark.parametrize(
    ("model", "device", "offered"), [("llama-3.1-8b", "rtx-4090", False), *whole(("llama-3.1-70b", "h100-80gb", True))]
)
def test_page_and_command_name_the_same_number_of_devices(run: Run, model: str, device: str, offered: bool) -> None:
    settings = Settings(model=model, device=device, count=8, recompute="none", seq=8192, batch=None)
    ((shown, recompute, device_bytes, is_offered),) = run(WAY_OUT, [(settings.as_data(), settings.model)])
    way = ways_out(
        lambda plan: settings.spec,
        plan=settings.plan,
        strategies=settings.strategies,
        # The page does not compute plans in host memory.
        cluster=replace(settings.cluster, host_bytes=0),
        optimizer="adamw",
    )[-1]
    assert (way.cluster.num_ranks, way.plan.recompute) == (shown, recompute)
    assert (way.plan.reduce_dtype, way.memory.device_bytes, is_offered) == ("fp32", device_bytes, offered)
