"""The launcher's private folder: what killed launchers left is removed, and nothing else."""

import tempfile
from pathlib import Path

import pytest

from shardwise.training.launch.private_folder import private_folder


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_its_user_can_read_it_and_it_goes_with_the_block(root: Path) -> None:
    with private_folder() as path:
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "store-0").touch()
    assert list(root.iterdir()) == []


def test_the_folder_of_a_launcher_that_lives_stays() -> None:
    with private_folder() as first, private_folder() as second:
        assert first.exists()
        assert second.exists()


def test_a_folder_that_nobody_holds_is_removed(root: Path) -> None:
    left = root / f"shardwise-launch-{'0' * 32}"
    left.mkdir(mode=0o700)
    (left / "store-0").touch()
    with private_folder():
        assert not left.exists()


@pytest.mark.parametrize("kind", ["another name", "open to others", "a link", "a file"])
def test_what_no_launcher_has_made_stays(root: Path, kind: str) -> None:
    path = root / f"shardwise-launch-{'notes' if kind == 'another name' else '0' * 32}"
    if kind == "a link":
        (root / "target").mkdir(mode=0o700)
        path.symlink_to(root / "target")
    elif kind == "a file":
        path.touch(mode=0o600)
    else:
        path.mkdir(mode=0o755 if kind == "open to others" else 0o700)
    with private_folder():
        assert path.exists()


def test_an_error_in_the_block_reaches_the_caller(root: Path) -> None:
    with pytest.raises(FileNotFoundError), private_folder():
        (root / "missing").read_text()
    assert list(root.iterdir()) == []
