"""What the user sees of each point of points.py, and what must hold after any of them."""

import time
from dataclasses import dataclass
from pathlib import Path

from processes import left_with, ranks_left

from shardwise.training.launch.launch import launch

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
    "sticks_after_exit": Shown(line="the process ended with exit code 7", below="broken on purpose"),
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


def failing_rank(point: str) -> int:
    return 1 + len(point) % 2


def launch_point(point: str, folder: Path, *, failing: int) -> int:
    """The exit code of a job of three ranks of which one goes wrong at this point."""
    return launch(
        [point, str(failing), str(folder)], num_ranks=3, max_restarts=0, folder=folder / "run", program=str(POINTS)
    )


def check_ended(point: str, folder: Path, *, code: int, errors: str) -> None:
    """The job that `launch_point` started, with POINT_FOLDER in its environment, ended as it must; just now."""
    seconds = time.monotonic() - float((folder / "failed-at").read_text())
    shown = SHOWN[point]
    assert errors.startswith(f"rank {failing_rank(point)} failed first{shown.where}: {shown.line}"), errors
    assert shown.below in errors
    assert "RanksDisagree" not in errors, "the peer that noticed is in its log"
    assert code == shown.code
    # A few on quiet cores; torch's agent would wait 30 s for the other ranks.
    assert seconds < 25.0
    assert left_with(f"POINT_FOLDER={folder}") == []
    assert ranks_left() == []
    if shown.code == 2 and not shown.below:
        assert errors.count("\n") == 1, "a user's mistake is one line"
