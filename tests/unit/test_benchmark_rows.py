"""benchmarks/rows.py: which rows are chosen, what is written after each, and when the exit code is 1."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import rows

    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    return rows


def some(rows: ModuleType, *names: str) -> list[Any]:
    return [rows.Row(name=name, run=lambda name=name: {"good": name != "bad"}) for name in names]


def test_a_name_chooses_its_row_and_a_part_of_names_all_that_contain_it(rows: ModuleType) -> None:
    def names(*all_names: str, only: str) -> list[str]:
        return [row.name for row in rows.chosen(some(rows, *all_names), only=only)]

    assert names("1", "2", "10", only="1") == ["1"]
    assert names("LoRA", "QLoRA, int8", "Muon", only="lora,muon") == ["LoRA", "QLoRA, int8", "Muon"]
    assert names("a", "b", only="") == ["a", "b"]
    assert [row.name for row in rows.chosen(some(rows, "a", "b"), only="", known=["a"])] == ["b"]


def test_a_row_whose_package_is_missing_is_left_out(rows: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    row = rows.Row(name="a", run=dict, needs=("no_such_package",))
    assert rows.chosen([row], only="") == []
    assert "not installed: no_such_package" in capsys.readouterr().err


def test_outcomes_are_kept_in_one_file_and_one_that_does_not_hold_is_exit_code_1(
    rows: ModuleType, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- section x -->\n\nold\n\n<!-- end of x -->\nafter\n")
    report = rows.Report(
        name="x",
        page=page,
        section="x",
        text=lambda found: ", ".join(found["rows"]),
        order=["good", "bad", "not run"],
    )

    def run(*names: str) -> int:
        code: int = rows.run(some(rows, *names), report=report, held=lambda found: found["good"], line=str)
        return code

    assert run("bad") == 1
    assert run("good") == 0
    assert list(json.loads((tmp_path / "x.json").read_text())["rows"]) == ["good", "bad"]
    assert page.read_text() == "before\n<!-- section x -->\n\ngood, bad\n\n<!-- end of x -->\nafter\n"
