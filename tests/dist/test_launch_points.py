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
