"""The compatibility matrix: its page shows what was measured, and none of ours is wrong."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    found = importlib.util.spec_from_file_location("compatibility", ROOT / "benchmarks" / "compatibility.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(matrix: ModuleType) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(matrix.RESULTS.read_text())
    return read


def test_the_page_is_what_the_results_say(matrix: ModuleType, results: dict[str, Any]) -> None:
    assert matrix.PAGE.read_text() == matrix.page(results, classes=matrix.architectures())


def test_60_architectures_of_transformers_and_20_of_timm_are_equal_or_refused(
    matrix: ModuleType, results: dict[str, Any]
) -> None:
    rows = results["rows"]
    assert sum(name.startswith("hf:") for name in rows) >= 60
    assert sum(name.startswith("timm:") for name in rows) >= 20
    assert all(row[matrix.ALONE]["finite"] for row in rows.values())
    verdicts = {row[strategy]["verdict"] for row in rows.values() for strategy in matrix.OURS}
    assert verdicts <= {"equal", "close", "refused"}
    assert "forward is called directly" in rows["hf:squeezebert"]["fsdp"]["line"]


def test_what_was_run_is_not_run_again(matrix: ModuleType) -> None:
    done = {"hf:bert": {name: {"verdict": "equal"} for name in (matrix.ALONE, *matrix.CONTESTANTS)}}
    assert matrix.left_to_do(done, ["hf:bert"]) == []
    del done["hf:bert"]["fsdp"]
    assert matrix.left_to_do(done, ["hf:bert"]) == ["hf:bert/fsdp"]
    broken = {"hf:bert": {matrix.ALONE: {"verdict": "failed"}}}
    assert matrix.left_to_do(broken, ["hf:bert"]) == []


@pytest.mark.whole
@pytest.mark.timeout(120)
def test_ranks_that_end_leave_a_verdict(matrix: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that notes a beginning and dies stands for ranks that crash."""
    (tmp_path / "train_rank.py").write_text(
        "import json, os, sys\n"
        "if os.environ['RANK'] == '0':\n"
        "    open(sys.argv[1], 'w').write(json.dumps({'begins': 'hf:bert', 'contestant': 'fsdp'}) + '\\n')\n"
        "os._exit(3)\n"
    )
    monkeypatch.setattr(matrix, "ROWS", tmp_path)
    (found,) = matrix.run(["hf:bert/fsdp"], limit_seconds=60)
    assert (found["architecture"], found["contestant"], found["verdict"]) == ("hf:bert", "fsdp", "failed")
    assert "exit code" in found["line"]
