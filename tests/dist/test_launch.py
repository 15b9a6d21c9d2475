"""The launcher: it starts ranks, starts them again, stops them, and nothing of it is heard beyond this machine."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import LOOPBACK, processes_with
from ranks import run_ranks
from whole import whole

from shardwise.training.launch.agent import JobFailed, JobStopped
from shardwise.training.launch.launch import InvalidFolder, launch, run_job

pytestmark = pytest.mark.usefixtures("forked_ranks")

HERE = Path(__file__).parent
LIGHT, JOINS = str(HERE / "light.py"), str(HERE / "joins.py")


def run_light(what: str, folder: Path, *, max_restarts: int = 0, grace_seconds: float = 30.0) -> int:
    return launch(
        [what, str(folder)],
        num_ranks=2,
        max_restarts=max_restarts,
        folder=folder / "run",
        grace_seconds=grace_seconds,
        program=LIGHT,
    )


def results(folder: Path, *, num_ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]


@contextmanager
def signalled(*numbers: int, folder: Path) -> Iterator[None]:
    """This process gets the signals, one after the other, as soon as both ranks are there."""

    def send() -> None:
        while not all((folder / f"started-{rank}-0").exists() for rank in (0, 1)):
            time.sleep(0.01)
        for number in numbers:
            time.sleep(0.1)
            os.kill(os.getpid(), number)
        time.sleep(0.1)
        (folder / "signalled").touch()

    thread = threading.Thread(target=send)
    thread.start()
    yield
    thread.join()


class TestOutput:
    def test_words_of_a_command_reach_the_ranks_as_they_are(self, tmp_path: Path) -> None:
        odd = tmp_path / "a $$ ${local_rank} 'b"
        odd.mkdir()
        assert run_light("ends", odd) == 0
        assert (odd / "started-1-0").exists()


class TestRestart:
    def test_a_killed_rank_starts_all_again(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        assert run_light("dies", tmp_path, max_restarts=3) == 0
        assert sorted(path.name for path in tmp_path.glob("started-*")) == [
            f"started-{rank}-{restarts}" for rank in (0, 1) for restarts in (0, 1, 2)
        ]
        killed = "rank 1 failed first: the process was killed by SIGKILL; restart"
        assert capfd.readouterr().err == f"{killed} 1 of 3\n{killed} 2 of 3\n"

    def test_restarts_come_to_an_end(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        assert run_light("dies", tmp_path, max_restarts=1) == 1
        assert capfd.readouterr().err.splitlines() == [
            "rank 1 failed first: the process was killed by SIGKILL; restart 1 of 1",
            "rank 1 failed first: the process was killed by SIGKILL",
            "its last lines:",
            "rank 1 speaks",
            f"what each rank wrote: {tmp_path}/run/logs/rank-*.txt",
        ]

    def test_what_the_program_raises_is_not_tried_again(self, tmp_path: Path) -> None:
        points = str(HERE / "points.py")
        code = launch(["raise_value", "1", str(tmp_path)], num_ranks=3, max_restarts=3, folder=tmp_path, program=points)
        assert code == 1
        assert (tmp_path / "logs/rank-1.txt").read_text().count("--- launcher") == 1


class TestSignals:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, *whole(signal.SIGHUP)])
    def test_a_signal_lets_the_ranks_save_and_ends_with_0(self, tmp_path: Path, number: signal.Signals) -> None:
        if signal.getsignal(number) is signal.SIG_IGN:
            pytest.skip("these tests run under nohup, and ranks leave a signal ignored that was so when they started")
        # The second is one too many, and is not passed on.
        with signalled(number, number, folder=tmp_path):
            assert run_light("saves", tmp_path, max_restarts=3) == 0
        assert (tmp_path / "saved-0").exists()
        assert (tmp_path / "saved-1").exists()

    def test_sigterm_waits_for_a_rank_that_cannot_take_it_yet(self, tmp_path: Path) -> None:
        with signalled(signal.SIGTERM, folder=tmp_path):
            assert run_light("saves-late", tmp_path) == 0
        assert (tmp_path / "saved-0").exists()
        assert (tmp_path / "saved-1").exists()

    def test_an_interrupt_lets_the_ranks_save_too_and_ends_with_130(self, tmp_path: Path) -> None:
        with signalled(signal.SIGINT, folder=tmp_path):
            assert run_light("saves", tmp_path) == 130
        assert (tmp_path / "saved-1").exists()

    def test_ranks_that_do_not_end_in_time_are_killed(self, tmp_path: Path) -> None:
        with signalled(signal.SIGTERM, folder=tmp_path):
            assert run_light("waits", tmp_path, grace_seconds=0.5) == 128 + signal.SIGTERM

    def test_a_second_interrupt_does_not_wait(self, tmp_path: Path) -> None:
        with signalled(signal.SIGINT, signal.SIGINT, folder=tmp_path):
            assert run_light("waits", tmp_path, grace_seconds=100) == 130

    def test_a_rank_that_cannot_save_is_no_reason_to_start_again(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with signalled(signal.SIGTERM, folder=tmp_path):
            assert run_light("is-stopped", tmp_path, max_restarts=3) == 128 + signal.SIGTERM
        assert capfd.readouterr().err.startswith("stopped by SIGTERM before all ranks had saved")

    def test_the_handlers_from_before_are_back(self, tmp_path: Path) -> None:
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)
        before = [signal.getsignal(number) for number in numbers]
        run_light("ends", tmp_path)
        assert [signal.getsignal(number) for number in numbers] == before

    def test_no_rank_outlives_a_launcher_that_is_killed_and_the_next_removes_what_it_left(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        code = f"import test_launch, pathlib; test_launch.run_light('waits', pathlib.Path({str(tmp_path)!r}))"
        paths = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        (temporary := tmp_path / "temporary").mkdir()
        environment = os.environ | {"PYTHONPATH": paths, "LAUNCH_FOLDER": str(tmp_path), "TMPDIR": str(temporary)}
        launcher = subprocess.Popen([sys.executable, "-c", code], env=environment)
        try:
            while not all((tmp_path / f"started-{rank}-0").exists() for rank in (0, 1)):
                assert launcher.poll() is None
                time.sleep(0.02)
        finally:
            launcher.kill()
            launcher.wait()
        deadline = time.monotonic() + 5.0
        while (left := processes_with(f"LAUNCH_FOLDER={tmp_path}")) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert left == []
        assert len(list(temporary.glob("shardwise-*"))) == 1
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        assert run_light("ends", tmp_path) == 0
        assert list(temporary.glob("shardwise-*")) == []


class TestJobAsAValue:
    """`run_job` says nothing to the user; how the job ended is told to its caller."""

    def run(self, what: str, folder: Path) -> signal.Signals | None:
        return run_job(
            [what, str(folder)],
            num_ranks=2,
            max_restarts=0,
            folder=folder / "run",
            grace_seconds=0.0 if what == "waits" else 30.0,
            program=LIGHT,
        )

    def test_a_failure_is_raised_with_what_the_rank_said(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(JobFailed) as caught:
            self.run("dies", tmp_path)
        failure = caught.value.failure
        assert (failure.rank, failure.what) == (1, "the process was killed by SIGKILL")
        assert capfd.readouterr().err == ""

    def test_a_signal_is_returned_where_all_ranks_ended_well_and_raised_where_not(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        for what in ("saves", "waits"):
            (tmp_path / what).mkdir()
        with signalled(signal.SIGTERM, folder=tmp_path / "saves"):
            assert self.run("saves", tmp_path / "saves") == signal.SIGTERM
        with signalled(signal.SIGINT, folder=tmp_path / "waits"), pytest.raises(JobStopped) as caught:
            self.run("waits", tmp_path / "waits")
        assert caught.value.number == signal.SIGINT
        assert capfd.readouterr().err == ""


def test_a_run_folder_has_one_job_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InvalidFolder, match="another job is writing into"):
            run_light("ends", tmp_path)
    assert run_light("ends", tmp_path) == 0


def test_a_run_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(InvalidFolder, match=r"run: cannot be written \(Not a directory\)"):
        run_light("ends", tmp_path)


def launch_one(rank: int, folder: str) -> int:
    """In a pool's worker: one of several launches at once, each of another size of job."""
    mine = Path(folder, str(rank))
    mine.mkdir()
    return launch([str(mine)], num_ranks=1 + rank % 2, max_restarts=0, folder=mine / "run", program=JOINS)


@pytest.mark.parametrize("num_jobs", [2, *whole(10)])
def test_launches_at_once_do_not_collide_and_listen_on_loopback_only(tmp_path: Path, num_jobs: int) -> None:
    assert run_ranks(launch_one, num_ranks=num_jobs, args=(str(tmp_path),)) == [0] * num_jobs
    for job in range(num_jobs):
        num_ranks = 1 + job % 2
        found = results(tmp_path / str(job), num_ranks=num_ranks)
        assert [rank["total"] for rank in found] == [sum(range(1 + num_ranks))] * num_ranks
        for rank in found:
            assert rank["listening"], "Gloo listens somewhere"
            assert {address for address, _ in rank["listening"]} <= LOOPBACK


def test_tasks_of_slurm_on_one_node_join_over_loopback(tmp_path: Path) -> None:
    slurm = {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}
    tasks = [
        subprocess.Popen(
            [sys.executable, JOINS, str(tmp_path)],
            env=os.environ | slurm | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in range(2)
    ]
    assert [task.wait(timeout=60) for task in tasks] == [0, 0]
    found = results(tmp_path, num_ranks=2)
    assert [(rank["rank"], rank["total"]) for rank in found] == [(0, 3), (1, 3)]
    # Of the parent, which is this test, nothing listens; of rank 0 the store does as well.
    assert len(found[0]["listening"]) > len(found[1]["listening"]) > 0
    assert {address for rank in found for address, _ in rank["listening"]} <= LOOPBACK
