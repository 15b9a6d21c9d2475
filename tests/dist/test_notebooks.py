"""The notebooks in examples/ run, from an empty folder, without Jupyter: their cells are plain Python."""

import json
import os
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))


def cells(path: Path) -> list[str]:
    data = json.loads(path.read_text())
    assert data["nbformat"] == 4
    return ["".join(cell["source"]) for cell in data["cells"] if cell["cell_type"] == "code"]


def marks_of(path: Path) -> list[pytest.MarkDecorator]:
    """The usual run starts a script under torchrun once, that of the README (test_documents.py)."""
    return [pytest.mark.whole] if any("torch.distributed.run" in cell for cell in cells(path)) else []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", [pytest.param(path, marks=marks_of(path), id=path.stem) for path in NOTEBOOKS])
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_"))]:
        monkeypatch.delenv(name)
    names: dict[str, object] = {"__name__": "notebook"}
    for number, cell in enumerate(cells(path)):
        exec(compile(cell, f"{path.name}, cell {number}", "exec"), names)


def test_notebooks_are_saved_without_outputs() -> None:
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        data = json.loads(path.read_text())
        assert not any(cell.get("outputs") for cell in data["cells"]), path.name
