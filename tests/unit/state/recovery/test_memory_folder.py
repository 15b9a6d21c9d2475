"""The private folder in memory: nobody else reads it, one job uses it, and what is left is found and freed."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from shardwise.base.errors import CheckpointError
from shardwise.base.files.held_folder import holding
from shardwise.comm.job.job_environment import MEMORY
from shardwise.state.recovery import memory_folder
from shardwise.state.recovery.memory_folder import MemoryFolder, free_leftovers, free_memory, new_key
from shardwise.state.recovery.memory_key import forget, key_for, key_in

HOLDER = """
import sys
from shardwise.state.recovery.memory_folder import MemoryFolder
folder = MemoryFolder(sys.argv[1], rank=0)
print(folder.node, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(MEMORY, str(tmp_path))
    monkeypatch.setattr(memory_folder, "_LOCK_SECONDS", 0.1)
    return tmp_path


@pytest.fixture
def holder() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A process of another job that uses the folder of a key."""
    key = new_key()
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, key], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    yield key, process
    process.kill()
    process.communicate()


def age(path: Path, *, seconds: float) -> None:
    for file in (*path.iterdir(), path):
        os.utime(file, (time.time() - seconds,) * 2)


def test_only_its_user_can_read_it(root: Path) -> None:
    folder = MemoryFolder(new_key(), rank=0)
    folder.write("x.json", "{}")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder.path.parent == root


def test_ranks_of_a_node_read_one_name() -> None:
    key = new_key()
    one, other = MemoryFolder(key, rank=0), MemoryFolder(key, rank=1)
    assert one.node == other.node
    assert one.node != MemoryFolder(new_key(), rank=0).node


@pytest.mark.parametrize("kind", ["open to others", "a link", "a file"])
def test_a_folder_that_is_not_private_is_refused(root: Path, tmp_path: Path, kind: str) -> None:
    key = new_key()
    path = root / f"shardwise-{key}"
    if kind == "open to others":
        path.mkdir()
        path.chmod(0o755)
    elif kind == "a link":
        path.symlink_to(tmp_path)
    else:
        path.write_text("")
    with pytest.raises(CheckpointError, match="is not a folder that this user alone can read; remove it"):
        MemoryFolder(key, rank=0)
    free_memory(key)
    assert path.exists()


@pytest.mark.timeout(60)
def test_a_second_job_is_refused_while_the_first_one_lives(holder: tuple[str, subprocess.Popen[str]]) -> None:
    key, process = holder
    with pytest.raises(CheckpointError, match="rank 0 of another job uses the snapshots of this run"):
        MemoryFolder(key, rank=0)
    process.kill()
    process.wait()
    MemoryFolder(key, rank=0).free()


@pytest.mark.timeout(60)
def test_leftovers_are_freed_when_their_job_is_gone(holder: tuple[str, subprocess.Popen[str]], root: Path) -> None:
    key, process = holder
    path = root / f"shardwise-{key}"
    (path / "data.state").write_bytes(bytes(8192))
    age(path, seconds=3600)
    # A rank lives.
    assert free_leftovers(own_key=new_key()) == (0, 0)
    process.kill()
    process.wait()
    # What started it lives: this process. It may start it again.
    assert free_leftovers(own_key=new_key()) == (0, 0)
    (path / "owner.json").write_text(json.dumps({"parent": process.pid, "began": 1}))
    # It was written to just now.
    assert free_leftovers(own_key=new_key()) == (0, 0)
    age(path, seconds=3600)
    # It is its own.
    assert free_leftovers(own_key=key) == (0, 0)
    count, num_bytes = free_leftovers(own_key=new_key())
    assert count == 1
    assert num_bytes >= 8192
    assert not path.exists()


def test_other_folders_are_left_alone(root: Path) -> None:
    for name in ("shardwise-mine", "other", f"shardwise-{'0' * 31}"):
        (root / name).mkdir(mode=0o700)
        age(root / name, seconds=3600)
    assert free_leftovers(own_key=new_key()) == (0, 0)


def abandoned(root: Path, *, num_files: int) -> Path:
    path = root / f"shardwise-{new_key()}"
    path.mkdir(mode=0o700)
    for number in range(num_files):
        (path / f"{number}.state").touch()
    (path / "rank-00000.lock").touch()
    age(path, seconds=3600)
    return path


@pytest.mark.timeout(60)
def test_jobs_that_start_at_once_free_each_leftover_once(root: Path) -> None:
    made = [abandoned(root, num_files=5) for _ in range(100)]
    with ThreadPoolExecutor(2) as threads:
        freed = [threads.submit(free_leftovers, own_key=new_key()) for _ in range(2)]
    assert sum(one.result()[0] for one in freed) == len(made)
    assert not any(root.iterdir())


@pytest.mark.timeout(60)
def test_folders_that_vanish_while_they_are_looked_at_are_passed_over(root: Path) -> None:
    ends = time.monotonic() + 1.0

    def free() -> None:
        while time.monotonic() < ends:
            free_leftovers(own_key=new_key())

    def churn() -> None:
        """Make leftovers that go by themselves, as those of a job that ends do."""
        while time.monotonic() < ends:
            with suppress(FileNotFoundError):
                shutil.rmtree(abandoned(root, num_files=20), ignore_errors=True)

    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(call) for call in (free, churn, free, churn)]
    for call in calls:
        call.result()


@pytest.mark.timeout(60)
def test_a_rank_that_starts_while_its_old_folder_is_freed_gets_a_new_one(root: Path) -> None:
    old = abandoned(root, num_files=1)
    with ThreadPoolExecutor(1) as threads:
        with holding(old, wait=False):
            rank = threads.submit(MemoryFolder, old.name.removeprefix("shardwise-"), rank=0)
            time.sleep(0.1)
            assert not rank.done()
            shutil.rmtree(old)
        folder = rank.result()
    assert folder.path == old
    assert (old / "node").read_text() == folder.node
    assert "0.state" not in folder.names()
    assert free_leftovers(own_key=new_key()) == (0, 0)


def test_a_run_folder_keeps_its_key_until_it_is_forgotten(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert key_in(run) is None
    key = key_for(run)
    assert key_for(run) == key_in(run) == key
    folder = MemoryFolder(key, rank=0)
    forget(run)
    assert not folder.path.exists()
    assert key_in(run) is None
    (run / "snapshots.json").write_text('{"key": "../../etc"}')
    assert key_in(run) is None
