"""Saving into a folder with links in it: nothing is removed where they point to."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shardwise.checkpoint import Checkpoints
from shardwise.state.checkpoint.disk import Disk


def save(folder: Path, *, step: int, keep: int = 1) -> None:
    Checkpoints(folder, keep=keep, asynchronous=False).save(nn.Linear(2, 2), step=step)


@pytest.mark.ledger("saving-is-a-link", outcome="right")
@pytest.mark.parametrize("name", [".saving-x", ".removing-x"])
def test_what_a_link_to_a_left_save_points_to_stays(tmp_path: Path, name: str) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "checkpoints"
    victim.mkdir()
    (victim / "thesis.txt").write_text("all of it")
    folder.mkdir()
    (folder / name).symlink_to(victim)
    save(folder, step=1)
    assert (victim / "thesis.txt").read_text() == "all of it"
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]


def test_pruning_a_linked_checkpoint_of_another_run_removes_the_link_alone(tmp_path: Path) -> None:
    other, folder = tmp_path / "other", tmp_path / "checkpoints"
    save(other, step=1)
    folder.mkdir()
    (folder / "step-00000001").symlink_to(other / "step-00000001")
    save(folder, step=2)
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    assert Checkpoints(other).latest() is not None


def test_a_folder_of_others_in_an_old_checkpoint_is_one_line_and_saving_goes_on(tmp_path: Path) -> None:
    lines: list[str] = []
    for step in (1, 2, 3):
        checkpoints = Checkpoints(tmp_path, keep=1, asynchronous=False, tell=lines.append)
        checkpoints.save(nn.Linear(2, 2), step=step)
        if step == 1:
            foreign = tmp_path / "step-00000001" / ".ipynb_checkpoints"
            foreign.mkdir()
            (foreign / "notes").write_text("mine")
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 3
    (left,) = tmp_path.glob(".removing-*")
    assert lines == [
        f"of the old checkpoint step-00000001, {left / '.ipynb_checkpoints'} was not removed (Is a directory): "
        "remove it yourself"
    ]
    assert [str(path.relative_to(left)) for path in sorted(left.rglob("*"))] == [
        ".ipynb_checkpoints",
        ".ipynb_checkpoints/notes",
    ]


@pytest.mark.parametrize("effect", ["rename", "remove_file", "remove_folder"])
def test_an_old_checkpoint_that_cannot_be_removed_does_not_fail_the_save(tmp_path: Path, effect: str) -> None:
    class Failing(Disk):
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if name != effect:
                return found

            def fail(path: Path, *others: Path) -> None:
                if effect == "rename" and not others[0].name.startswith(".removing-"):
                    return found(path, *others)
                raise OSError(16, "Device or resource busy", str(path))

            return fail

    lines: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep=1, asynchronous=False, tell=lines.append, disk=Failing())
    for step in (1, 2):
        checkpoints.save(nn.Linear(2, 2), step=step)
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 2
    assert len(lines) == 1
    assert "was not removed (Device or resource busy)" in lines[0]
