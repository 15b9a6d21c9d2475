"""Errors of a recording as one line, with the place in the user's source."""

import runpy
from pathlib import Path

import pytest

from shardwise.engine.graphs.not_captured import NotCaptured, in_one_line


def test_an_error_is_placed_in_the_users_source_also_below_a_folder_of_our_name(tmp_path: Path) -> None:
    file = tmp_path / "shardwise" / "torch" / "model.py"
    file.parent.mkdir(parents=True)
    file.write_text("import torch\ntorch.empty(2).view(3)\n")
    with pytest.raises(RuntimeError) as raised:
        runpy.run_path(str(file))
    assert in_one_line(raised.value).startswith("model.py:2 (torch.empty(2).view(3)): shape '[3]' is invalid")


def test_a_reason_stays_as_it_is_and_a_compilation_is_named() -> None:
    assert in_one_line(NotCaptured("it reads a value")) == "it reads a value"
    line = "Detected recompile when torch.compile stance is 'fail_on_recompile'. filename: 'model.py'"
    assert in_one_line(RuntimeError(line)) == (
        "torch.compile compiles again when the unit is recorded: filename: 'model.py'"
    )
