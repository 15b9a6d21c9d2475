"""scripts/profile_memory.py: its formulas against steps that it measures."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardwise.models.catalogue import shape_of
from shardwise.plan.placement import STRATEGIES

SCRIPT = Path(__file__).parents[2] / "scripts" / "profile_memory.py"

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("profile_memory", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["profile_memory"] = module
    spec.loader.exec_module(module)
    return module


def both(script: ModuleType, shape: Any, *, batch_size: int) -> tuple[Any, Any]:
    one_process = {"placement": STRATEGIES["ddp"], "ranks": 1, "foreach": False}
    formula = script.step_bytes(shape, batch_size=batch_size, **one_process)
    return formula, script.measure(shape, batch_size=batch_size, device="cpu")


@pytest.mark.parametrize(("name", "batch_size"), [("vit-digits", 16), ("vit-tiny", 2)])
def test_every_formula_is_exact_where_activations_weigh_most(script: ModuleType, name: str, batch_size: int) -> None:
    formula, measured = both(script, shape_of(name), batch_size=batch_size)
    assert measured == formula


def test_the_peak_is_the_optimizers_where_the_batch_is_small(script: ModuleType) -> None:
    formula, measured = both(script, shape_of("vit-digits"), batch_size=2)
    assert replace(measured, peak=0) == replace(formula, peak=0)
    # The loop still holds the temporary of the parameter before: at most a bias here, 16·width bytes.
    assert 0 <= measured.peak - formula.peak <= 16 * shape_of("vit-digits").width


def test_half_precision_halves_what_matrix_products_read(script: ModuleType) -> None:
    shape = shape_of("vit-large")
    whole, autocast, half = (
        script.activation_bytes(shape, batch_size=1, stream_bytes=stream, matmul_bytes=matmul)
        for stream, matmul in ((4, 4), (4, 2), (2, 2))
    )
    numbers = 197 * 1024
    assert whole - autocast == 2 * (24 * 14 * numbers + 1024)
    assert autocast - half == 2 * (24 * 2 + 1) * numbers


def test_sharded_kinds_are_divided_by_the_ranks_and_nothing_else_is(script: ModuleType) -> None:
    shape = shape_of("vit-base")
    for name, placement in STRATEGIES.items():
        found = script.step_bytes(shape, batch_size=8, placement=placement, ranks=4, foreach=True)
        for kind, copies in (("params", 4), ("grads", 4), ("optim", 8)):
            shares = 4 if getattr(placement, kind).value == "sharded" else 1
            assert getattr(found, kind) == copies * shape.num_params // shares, (name, kind)
        assert found.activations == script.activation_bytes(shape, batch_size=8)
    assert found.peak < script.step_bytes(shape, batch_size=8, placement=STRATEGIES["ddp"], ranks=4, foreach=True).peak


def test_a_size_that_does_not_fit_says_so(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "free_bytes", lambda device: 2**30)
    profiler = script.Profiler(device="cpu", batch_size=4, unhurried=True)
    formula = script.step_bytes(shape_of("vit-huge"), batch_size=4, placement=STRATEGIES["ddp"], ranks=1, foreach=False)
    assert profiler.measure(shape_of("vit-huge"), formula=formula) == "not measured: needs 10.6 GiB, 1.0 free"


def test_a_size_that_takes_too_long_says_so(script: ModuleType) -> None:
    profiler = script.Profiler(device="cpu", batch_size=4, unhurried=False)
    profiler.seconds_per_flop = 1e-6
    formula = script.step_bytes(shape_of("vit-tiny"), batch_size=4, placement=STRATEGIES["ddp"], ranks=1, foreach=False)
    said = profiler.measure(shape_of("vit-tiny"), formula=formula)
    assert said.startswith("not measured: about ")
    assert said.endswith("--measure to try")


def test_the_table_shows_formula_measurement_and_strategies(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model-size", "tiny", "--batch-size", "1", "--strategy", "fsdp", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
    script.main()
    shown = capsys.readouterr().out
    words = ("vit-tiny", "1 process, formula", "1 process, measured", "fsdp on 2, formula", "activations")
    assert all(word in shown for word in words), shown
