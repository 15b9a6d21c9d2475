"""Ranks that are started again are forked from a process that has imported everything; they are ranks like any other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import left_with

from shardwise.comm.job_environment import WARM

PROGRAM = Path(__file__).with_name("warmed.py")


def launched(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from pathlib import Path; from shardwise.launch.launch import launch;"
        f"sys.exit(launch({[str(folder), *words]!r}, num_ranks=2, max_restarts=100, folder=Path({str(folder)!r}),"
        f"program={str(PROGRAM)!r}))"
    )
    environment = os.environ | {WARM: "0", "TMPDIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=100
    )


@pytest.mark.timeout(120)
def test_a_forked_rank_is_a_child_of_the_launcher_with_its_own_group_and_random_numbers(tmp_path: Path) -> None:
    done = launched(tmp_path, "one", "$two")
    assert done.returncode == 0, done.stderr
    assert "rank 1 failed first: the process was killed by SIGKILL; restart 1 of 100" in done.stderr
    one, other = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    for rank in (one, other):
        assert rank["parent"]
        assert rank["leads"]
        assert rank["total"] == [2.0] * 4
        assert rank["threads"] == 1
        assert rank["words"] == ["one", "$two"]
    assert one["random"] != other["random"]
    assert left_with(f"TMPDIR={tmp_path}") == []


@pytest.mark.timeout(120)
def test_an_error_of_a_forked_rank_is_reported_as_always(tmp_path: Path) -> None:
    done = launched(tmp_path, "fail")
    assert done.returncode == 1
    assert "failed first: ValueError: as asked" in done.stderr
    assert left_with(f"TMPDIR={tmp_path}") == []
