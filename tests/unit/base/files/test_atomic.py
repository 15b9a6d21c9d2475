import os
from pathlib import Path

import pytest

from shardwise.base.files.atomic import atomic_write


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_write(path) as file:
        file.write(b"first")
        assert not path.exists()
    assert path.read_bytes() == b"first"


def test_after_an_error_the_old_file_stands_and_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_has_the_rights_of_an_ordinary_one(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    with atomic_write(tmp_path / "file") as file:
        file.write(b"x")
    assert os.stat(tmp_path / "file").st_mode == plain.stat().st_mode
