"""The lock of a run folder: one job at a time, and nothing outside the folder is changed or removed."""

import fcntl
import os
from pathlib import Path

import pytest

from reliability.said import say
from shardwise.launch.folder_lock import InvalidFolder, locked, private_folder


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of somebody's data whose name begins as our private ones do."""
    folder = tmp_path / "shardwise-data"
    folder.mkdir(mode=0o700)
    (folder / "thesis.txt").write_text("all of it")
    return folder


def claim(run: Path) -> None:
    with locked(run) as lock, private_folder(lock) as private:
        assert (private / "lock").is_file()


@pytest.mark.ledger("lock-names-a-folder", outcome="right")
def test_a_folder_named_in_the_lock_is_not_removed_unless_it_belongs_to_the_lock(tmp_path: Path, victim: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for left in (str(victim), os.path.relpath(victim), f"{victim}/../shardwise-data", "shardwise-\0"):
        (run / ".lock").write_text(left)
        claim(run)
        assert (victim / "thesis.txt").read_text() == "all of it"
    # Of another run folder's lock.
    (victim / "lock").write_text("1:2")
    (run / ".lock").write_text(str(victim))
    claim(run)
    assert (victim / "thesis.txt").exists()


def test_a_private_folder_is_not_removed_through_a_link(tmp_path: Path, victim: Path) -> None:
    run, link = tmp_path / "run", tmp_path / "shardwise-link"
    claim(run)
    status = (run / ".lock").stat()
    (victim / "lock").write_text(f"{status.st_dev}:{status.st_ino}")
    link.symlink_to(victim)
    (run / ".lock").write_text(str(link))
    claim(run)
    assert (victim / "thesis.txt").exists()


@pytest.mark.ledger("lock-is-a-link", outcome="refused")
@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(tmp_path: Path, kind: str) -> None:
    target, run = tmp_path / "target", tmp_path / "run"
    target.write_text("precious")
    run.mkdir()
    if kind == "symbolic":
        (run / ".lock").symlink_to(target)
    else:
        (run / ".lock").hardlink_to(target)
    with pytest.raises(InvalidFolder, match=r"\.lock: is a (hard )?link.*choose another --run") as caught:
        claim(run)
    say(str(caught.value))
    assert target.read_text() == "precious"


def test_a_lock_that_is_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(InvalidFolder, match="not a regular file"):
        claim(tmp_path)


def test_a_folder_in_use_is_refused_and_a_holder_that_ends_in_time_is_waited_for(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(InvalidFolder, match="another job is writing into"), locked(tmp_path):
        pass
    with (tmp_path / ".lock").open() as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        if os.fork() == 0:
            # The child keeps the lock a moment longer than its parent, as a rank's workers do.
            import time

            time.sleep(0.5)
            os._exit(0)
    with locked(tmp_path, wait_seconds=10.0):
        pass
    os.wait()
