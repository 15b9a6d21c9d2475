"""The lock of a run folder: one job at a time, and nothing outside the folder is changed."""

import fcntl
import os
from pathlib import Path

import pytest

from reliability.said import say
from shardwise.training.launch.folder_lock import InvalidFolder, locked
from shardwise.training.launch.launch import run_job


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
    with pytest.raises(InvalidFolder, match=r"\.lock: is a (hard )?link.*choose another --run") as caught, locked(run):
        pass
    say(str(caught.value))
    assert target.read_text() == "precious"


def test_a_lock_that_is_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(InvalidFolder, match="not a regular file"), locked(tmp_path):
        pass


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


def test_logs_are_not_written_through_a_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = tmp_path / "run"
    run.mkdir()
    (run / "logs").symlink_to(elsewhere)
    with pytest.raises(InvalidFolder, match="logs: cannot be written .is a link; .* remove it"):
        run_job([], num_ranks=1, max_restarts=0, folder=run, grace_seconds=1.0, program="none")
    assert list(elsewhere.iterdir()) == []
