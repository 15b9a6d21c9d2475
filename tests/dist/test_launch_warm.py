"""Ranks are forked from a process that has imported everything; they are ranks like any other."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import left_with

from shardwise.doors.cli.autopsy import autopsy
from shardwise.training.launch.launch import launch

PROGRAM = Path(__file__).with_name("warmed.py")
LIGHT = Path(__file__).with_name("light.py")
Job = tuple[Path, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that is started again once, and then fails: its folder, and how it ended."""
    folder = tmp_path_factory.mktemp("warm")
    code = (
        "import sys; from pathlib import Path; from shardwise.training.launch.launch import launch;"
        f"sys.exit(launch({[str(folder), 'one', '$two', 'fail']!r}, num_ranks=2, max_restarts=2,"
        f"folder=Path({str(folder)!r}), program={str(PROGRAM)!r}))"
    )
    environment = os.environ | {"TMPDIR": str(folder)}
    return folder, subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=100
    )


@pytest.mark.timeout(120)
def test_a_forked_rank_is_a_child_of_the_launcher_with_its_own_group_and_random_numbers(job: Job) -> None:
    folder, done = job
    assert "rank 1 failed first: the process was killed by SIGKILL; restart 1 of 2" in done.stderr
    one, other = (json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    for rank in (one, other):
        assert rank["forked"]
        assert rank["parent"]
        assert rank["leads"]
        assert rank["total"] == [2.0] * 4
        assert rank["threads"] == 1
        assert rank["words"] == ["one", "$two", "fail"]
    assert one["random"] != other["random"]


@pytest.mark.timeout(120)
def test_a_rank_is_shown_by_its_number_and_its_program_instead_of_what_it_was_forked_from(job: Job) -> None:
    folder, _ = job
    for number in (0, 1):
        shown = json.loads((folder / f"rank-{number}.json").read_text())["shown"]
        assert f"shardwise rank {number} of 2: {PROGRAM} {folder} one $two fail".startswith(shown)
        assert shown.startswith(f"shardwise rank {number} of 2: /")


@pytest.mark.timeout(120)
def test_autopsy_tells_of_a_rank_that_was_killed_and_replaced(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(job[0], tmp_path / "run", ignore=shutil.ignore_patterns("rank-*.json")))
    autopsy(folder, as_json=True)
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["kind"], finding["ranks"]) == ("replaced", [1])
    assert finding["text"] == "rank 1 failed first: the process was killed by SIGKILL; restart 1 of 2"
    autopsy(folder)
    assert capsys.readouterr().out.startswith(f"{finding['text']}\n")


@pytest.mark.timeout(120)
def test_an_error_of_a_forked_rank_is_reported_as_always(job: Job) -> None:
    folder, done = job
    assert done.returncode == 1
    assert "failed first: ValueError: as asked" in done.stderr
    assert left_with(f"TMPDIR={folder}") == []


@pytest.mark.timeout(120)
def test_rank_0_speaks_on_the_terminal_and_the_others_in_their_logs(job: Job) -> None:
    folder, done = job
    assert done.stdout == "rank 0 speaks\n"
    assert "rank 1 speaks" in (folder / "logs/rank-1.txt").read_text()


@pytest.mark.timeout(60)
def test_without_what_they_are_forked_from_ranks_are_new_processes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = launch(
        ["ends", str(tmp_path)],
        num_ranks=2,
        max_restarts=0,
        folder=tmp_path / "run",
        program=str(LIGHT),
        imports=["not_there"],
    )
    assert code == 0
    said = capfd.readouterr()
    assert said.out == "rank 0 speaks\n"
    assert "No module named 'not_there'" in said.err
