"""A rank that goes wrong at any point ends the whole job in seconds, and it is its message that the user sees."""

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import processes_with
from whole import whole

from reliability.said import say
from shardwise.launch.launch import launch

POINTS = Path(__file__).parent / "points.py"
MISTAKE = "InvalidData: broken on purpose"
VALUE = "ValueError: broken on purpose"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What the user sees of a point: the line of the rank that failed first, and the exit code."""

    line: str
    code: int = 1
    below: str = ""
    where: str = ""


SHOWN = {
    "raise_value": Shown(line=VALUE, below="raise ValueError"),
    "raise_mistake": Shown(line=MISTAKE, code=2),
    "command_line_mistake": Shown(line=MISTAKE, code=2),
    "mistake_without_a_word": Shown(line="the process ended with exit code 2", code=2, below="broken on purpose"),
    "chained": Shown(line=VALUE, below="KeyError: 'the cause'"),
    "in_a_group": Shown(line="ExceptionGroup: broken on purpose (2 sub-exceptions)", below="TypeError: two"),
    "in_a_step": Shown(line=VALUE, where=" (step 17)"),
    "too_deep": Shown(line="RecursionError: maximum recursion depth exceeded"),
    "no_memory": Shown(line="MemoryError: broken on purpose"),
    "exit_code": Shown(line="the process ended with exit code 7", below="broken on purpose"),
    "exits_with_0": Shown(line="the process ended with exit code 0 while other ranks were still", below="gone early"),
    "exit_at_once": Shown(line="the process ended with exit code 5", below="broken on purpose"),
    "not_an_exception": Shown(line="the process ended with exit code 1", below="CancelledError: broken on purpose"),
    "sigkill": Shown(line="the process was killed by SIGKILL"),
    "sigterm": Shown(line="the process was killed by SIGTERM"),
    "sigint": Shown(line="the process was killed by SIGINT"),
    "null_pointer": Shown(line="the process was killed by SIGSEGV", below="string_at"),
    "abort": Shown(line="the process was killed by SIGABRT", below="in abort"),
    "sticks_in_a_destructor": Shown(line=VALUE),
    "sticks_in_a_handler": Shown(line=VALUE),
    "leaves_a_child": Shown(line=VALUE),
    "leaves_a_daemon": Shown(line=VALUE),
    "killed_with_a_child": Shown(line="the process was killed by SIGKILL"),
    "after_its_echo": Shown(line=VALUE),
    "many_lines": Shown(line=VALUE),
    "not_text": Shown(line=VALUE),
    "device_lost": Shown(line="AcceleratorError: broken on purpose"),
}
# Each waits for what does not come.
SLOW = ("sticks_in_a_handler", "leaves_a_daemon")


LISTED = {"exits_with_0": pytest.mark.ledger("rank-exits-with-0", outcome="refused")}


@pytest.mark.parametrize(
    "point",
    [
        *(pytest.param(name, marks=LISTED.get(name, ())) for name in SHOWN if name not in SLOW),
        *whole(*SLOW),
    ],
)
def test_a_rank_that_goes_wrong_ends_the_job_with_its_own_message(
    point: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = SHOWN[point]
    failing = 1 + len(point) % 2
    monkeypatch.setenv("POINT_FOLDER", str(tmp_path))
    code = launch(
        [point, str(failing), str(tmp_path)], num_ranks=3, max_restarts=0, folder=tmp_path / "run", program=str(POINTS)
    )
    seconds = time.monotonic() - float((tmp_path / "failed-at").read_text())
    errors = say(capfd.readouterr().err)
    assert errors.startswith(f"rank {failing} failed first{shown.where}: {shown.line}"), errors
    assert shown.below in errors
    assert "RanksDisagree" not in errors, "the peer that noticed is in its log"
    assert code == shown.code
    assert seconds < 10.0
    assert processes_with(f"POINT_FOLDER={tmp_path}") == []
    if shown.code == 2 and not shown.below:
        assert errors.count("\n") == 1, "a user's mistake is one line"


def test_rank_0_on_the_terminal_shows_its_own_failure_once_and_no_echo(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launch(
        ["raise_value", "0", str(tmp_path)], num_ranks=3, max_restarts=0, folder=tmp_path / "run", program=str(POINTS)
    )
    errors = capfd.readouterr().err
    assert errors.startswith(f"rank 0 failed first: {VALUE}")
    assert errors.count("Traceback") == 1
    echo = tmp_path / "echo"
    echo.mkdir()
    launch(["raise_value", "2", str(echo)], num_ranks=3, max_restarts=0, folder=echo / "run", program=str(POINTS))
    errors = capfd.readouterr().err
    assert errors.startswith(f"rank 2 failed first: {VALUE}")
    assert errors.count("Traceback") == 1
