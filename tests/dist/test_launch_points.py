"""A rank that goes wrong at any point ends the whole job in seconds, and it is its message that the user sees."""

from pathlib import Path

import pytest
from shown_points import SHOWN, VALUE, check_ended, failing_rank, launch_point
from whole import whole

from reliability.said import say

pytestmark = pytest.mark.usefixtures("forked_ranks")

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
    monkeypatch.setenv("POINT_FOLDER", str(tmp_path))
    code = launch_point(point, tmp_path, failing=failing_rank(point))
    check_ended(point, tmp_path, code=code, errors=say(capfd.readouterr().err))


@pytest.mark.parametrize("delay_seconds", [0.0, *whole(1.0, 3.5), 5.0])
@pytest.mark.parametrize(
    ("point", "line"),
    [
        ("after_its_echo", VALUE),
        ("exit_code_after_its_echo", "the process ended with exit code 3 and left no report; rank 0 noticed first"),
        ("exits_with_0_after_its_echo", "the process ended with exit code 0 while other ranks were still running"),
    ],
)
def test_a_rank_that_reports_long_after_its_echo_is_the_one_that_failed(
    point: str,
    line: str,
    delay_seconds: float,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POINT_DELAY_SECONDS", str(delay_seconds))
    if delay_seconds == 0.0:
        # The peer may not have written its echo yet.
        line = line.partition(" and left no report")[0]
    launch_point(point, tmp_path, failing=2)
    errors = capfd.readouterr().err
    assert errors.startswith(f"rank 2 failed first: {line}"), errors
    assert "RanksDisagree" not in errors


def test_an_echo_of_a_rank_that_never_reports_says_that_this_rank_still_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.training.launch.agent._CAUSE_SECONDS", 1.0)
    assert launch_point("never_reports", tmp_path, failing=2) == 2
    assert capfd.readouterr().err.startswith(
        "rank 0 failed first: RanksDisagree: rank 2 could not continue; rank 2 is still running and has reported nothing"
    )


def test_rank_0_on_the_terminal_shows_its_own_failure_once_and_no_echo(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launch_point("raise_value", tmp_path, failing=0)
    errors = capfd.readouterr().err
    assert errors.startswith(f"rank 0 failed first: {VALUE}")
    assert errors.count("Traceback") == 1
    echo = tmp_path / "echo"
    echo.mkdir()
    launch_point("raise_value", echo, failing=2)
    errors = capfd.readouterr().err
    assert errors.startswith(f"rank 2 failed first: {VALUE}")
    assert errors.count("Traceback") == 1
