"""Saving into a folder with links in it: nothing is removed where they point to."""

from pathlib import Path

import pytest
from torch import nn

from shardwise.checkpoint import Checkpoints


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
