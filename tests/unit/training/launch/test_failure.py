"""A failure as the rank tells it, and which of several was the first."""

import errno
import faulthandler
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shardwise.base.errors import CheckpointError, DiskFailed, InvalidPlan
from shardwise.comm.groups.agreement import RanksDisagree, RanksMissing, about
from shardwise.training.launch.failure import Failure, avoided_next, during, ended, failure_of, first, report, reported

GLOO = "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:13963."


def raised(error: BaseException) -> Failure:
    try:
        raise error
    except BaseException as caught:
        return failure_of(caught, rank=2)


def test_an_error_that_passes_on_the_failure_of_a_rank_is_an_echo_that_names_it() -> None:
    told = raised(about(CheckpointError("rank 3 could not continue: OSError"), 3))
    assert (told.echo, told.peer) == (True, 3)
    assert raised(CheckpointError("rank 3 could not continue, says a file")).echo is False


def test_a_failure_that_the_next_start_avoids_passes_and_carries_its_notes() -> None:
    error = RuntimeError("out of memory")
    error.add_note("held then: params")
    error.add_note("during step 3")
    assert not raised(error).passing
    avoided_next(error, "resumes under a smaller plan")
    told = raised(error)
    assert told.passing
    assert told.where == "step 3"
    assert told.notes == "held then: params\n  the next start resumes under a smaller plan"


def failure(rank: int, *, seconds: float, echo: bool = False) -> Failure:
    return Failure(rank=rank, seconds=seconds, what="", echo=echo)


class TestFirst:
    def test_is_the_earliest(self) -> None:
        assert first([failure(0, seconds=2.0), failure(1, seconds=1.0)]).rank == 1

    def test_is_no_echo_where_there_is_a_cause_even_a_later_one(self) -> None:
        assert first([failure(0, seconds=1.0, echo=True), failure(1, seconds=2.0)]).rank == 1

    def test_is_the_echo_of_a_rank_that_no_report_explains_further(self) -> None:
        passed_on = Failure(rank=0, seconds=1.0, what="", echo=True, peer=1)
        assert first([passed_on, failure(1, seconds=2.0, echo=True)]).rank == 1

    def test_is_the_earliest_echo_where_there_is_nothing_else(self) -> None:
        assert first([failure(0, seconds=2.0, echo=True), failure(1, seconds=1.0, echo=True)]).rank == 1


@pytest.mark.parametrize(
    "error",
    [RanksDisagree("…"), RanksMissing("…"), RuntimeError(GLOO), dist.DistNetworkError("…"), dist.DistBackendError("…")],
    ids=lambda error: type(error).__name__,
)
def test_what_only_tells_of_a_peer_is_an_echo(error: Exception) -> None:
    assert raised(error).echo
    wrapped = ValueError("saving failed")
    wrapped.__cause__ = error
    assert raised(wrapped).echo


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (ValueError("a shape"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (InvalidPlan("no such strategy"), False),
        (RanksMissing("rank 1 did not come"), False),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), False),
        (OSError(errno.EIO, "Input/output error"), True),
        (DiskFailed("the checkpoint of step 2 was not written: rank 1: OSError: …"), True),
        (CheckpointError("the checkpoint does not fit the model"), False),
        (ConnectionResetError("peer"), True),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error"), True),
        (RuntimeError(GLOO), True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_only_what_came_from_outside_the_program_may_pass(error: Exception, passing: bool) -> None:
    assert raised(error).passing is passing


def test_a_users_mistake_has_no_traceback_and_any_other_error_has_one() -> None:
    assert raised(InvalidPlan("no such strategy")).traceback == ""
    assert raised(InvalidPlan("no such strategy")).mistake
    assert "raise error" in raised(ValueError("…")).traceback


def test_a_failure_names_the_step_and_the_module() -> None:
    class Breaks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("too large")

    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU(), Breaks()))
    with pytest.raises(ValueError, match="too large") as caught, during("epoch 2"), during("step 17"):
        model(torch.ones(1))
    assert str(failure_of(caught.value, rank=2)) == "rank 2 failed first (epoch 2, step 17, 1.1): ValueError: too large"


@pytest.mark.parametrize(
    ("code", "what", "passing", "mistake"),
    [
        (-signal.SIGKILL, "the process was killed by SIGKILL", True, False),
        (-(signal.SIGRTMIN + 3), f"the process was killed by signal {signal.SIGRTMIN + 3}", True, False),
        (1, "the process ended with exit code 1", False, False),
        (2, "the process ended with exit code 2", False, True),
    ],
)
def test_a_process_that_ends_without_a_word_is_told_by_its_exit_code(
    code: int, what: str, passing: bool, mistake: bool
) -> None:
    told = ended(code, rank=1, log="\n".join(map(str, range(100))))
    assert (told.what, told.passing, told.mistake) == (what, passing, mistake)
    assert told.traceback.splitlines()[-1] == "99"
    assert len(told.traceback.splitlines()) < 20


class TestReport:
    @pytest.fixture
    def path(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        path = tmp_path / "error.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        # It ends the process.
        monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *args, **kwargs: None)
        return path

    def test_is_read_back_as_it_was(self, path: Path) -> None:
        assert reported(path) is None
        report(ValueError("too large"), rank=3)
        told = reported(path)
        assert told is not None
        assert (told.rank, told.what) == (3, "ValueError: too large")

    def test_is_in_the_format_of_torchs_agent(self, path: Path) -> None:
        report(ValueError("too large"), rank=3)
        theirs = ProcessFailure(local_rank=0, pid=os.getpid(), exitcode=1, error_file=str(path))
        assert theirs.message["message"] == "ValueError: too large"

    def test_is_of_the_first_error_only(self, path: Path) -> None:
        report(ValueError("too large"), rank=3)
        report(RuntimeError("while cleaning up"), rank=3)
        assert json.loads(path.read_text())["shardwise"]["what"] == "ValueError: too large"


STICKS = """
import atexit, ctypes, sys, threading
from shardwise.training.launch.failure import report

class Sticky:
    def __del__(self):
        wait()

def wait():
    while True:
        ctypes.CDLL(None).sleep(1000)

report(ValueError("too large"), rank=0)
if sys.argv[1] == "a destructor":
    sys.modules["sticky"] = Sticky()
elif sys.argv[1] == "an exit handler":
    atexit.register(wait)
else:
    threading.Thread(target=wait).start()
"""


def test_a_rank_that_has_reported_ends_by_itself_whatever_it_waits_for() -> None:
    """As a group does whose threads wait for peers: also under torchrun, where nobody kills it for 30 s."""
    waits = ("a destructor", "an exit handler", "a thread")
    processes = [
        subprocess.Popen([sys.executable, "-c", STICKS, wait], stderr=subprocess.PIPE, text=True) for wait in waits
    ]
    for process in processes:
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 1
        assert "in wait" in errors, "it shows where it stuck"
