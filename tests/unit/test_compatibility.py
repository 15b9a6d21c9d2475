"""The pages of compatibility.py, scenarios.py and integrations.py show what was measured, and none of ours is wrong."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PATHS = [str(ROOT / folder) for folder in ("benchmarks", "tests/dist", "tests")]
PAGES = ("compatibility", "scenarios", "integrations")


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*PATHS, *sys.path])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield {name: importlib.import_module(name) for name in PAGES}
    for name in set(sys.modules) - before:
        if name.split(".")[0] in (*PAGES, "parity", "scenario_rows", "rows", "measuring", "workers"):
            sys.modules.pop(name)


def test_the_pages_are_what_the_results_say(pages: dict[str, ModuleType]) -> None:
    for name, module in pages.items():
        report = module.REPORT
        assert report.page.read_text() == report.page_text(), f"{report.page.name} is old: write_page() of {name}.py"


def test_60_architectures_of_transformers_and_20_of_timm_are_equal_or_refused(pages: dict[str, ModuleType]) -> None:
    matrix = pages["compatibility"]
    rows = matrix.REPORT.read()["rows"]
    assert sum(name.startswith("hf:") for name in rows) >= 60
    assert sum(name.startswith("timm:") for name in rows) >= 20
    assert all(sys.modules["parity"].held(row) for row in rows.values())
    assert all(set(row) == set(matrix.ENGINES) for row in rows.values())
    assert "forward is called directly" in rows["hf:squeezebert"]["fsdp"]["line"]


def test_no_training_of_ours_is_wrong_and_every_row_has_a_result(pages: dict[str, ModuleType]) -> None:
    report = pages["scenarios"].REPORT
    rows = report.read()["rows"]
    assert list(rows) == list(report.order)
    assert all(sys.modules["parity"].held(row) for row in rows.values())


def test_a_verdict_is_of_the_worst_rank(pages: dict[str, ModuleType]) -> None:
    import torch

    verdict = sys.modules["parity"].verdict
    expected = {"a": torch.ones(2), "zero": torch.zeros(2)}

    def found(value: float) -> dict[str, object]:
        return {"weights": {"a": torch.full((2,), value), "zero": torch.full((2,), 1e-9)}, "owned": False}

    same = {"weights": expected, "owned": True}
    assert verdict([same, same], expected) == {"verdict": "equal", "distance": 0.0, "owned": True}
    assert verdict([same, found(1 + 1e-6)], expected)["verdict"] == "close"
    assert verdict([same, found(1.1)], expected)["verdict"] == "wrong"
    assert verdict([same, found(float("nan"))], expected)["distance"] == float("inf")
    refused, failed = ({"verdict": word, "line": word} for word in ("refused", "failed"))
    assert verdict([refused, failed], expected) == failed
