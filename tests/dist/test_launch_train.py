"""`shardwise train` on two ranks, one of which breaks somewhere: the user sees where, and nothing is left running."""

import json
import os
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest
from processes import left_with, ranks_left
from whole import whole

from reliability.said import say
from shardwise.comm.autopsy.findings import FAILED, verdict
from shardwise.comm.autopsy.record_folder import read_records
from shardwise.doors.cli.app import main
from shardwise.plan import Plan
from shardwise.training.launch.launch import launch

CONFIG = f"""
[task]
model = "python:{Path(__file__).parent / "breaking.py"}:make"
[plan]
strategy = "fsdp"
micro_batch = 2
units = "class:Block"
[train]
steps = 8
[checkpoint]
every = 2
[run]
device = "cpu"
tensorboard = false
"""
SHOWN = {
    "the model": "rank 1 failed first: InvalidModel: ",
    "the data": "rank 1 failed first (step 1): ValueError: Caught ValueError in DataLoader worker process 0.",
    "forward": "rank 1 failed first (step 3, blocks.1): ValueError: broken in forward",
    "backward": "rank 1 failed first (step 1): ValueError: broken in backward",
    "the optimizer": "rank 1 failed first (step 1): ValueError: broken in the optimizer",
}


def broken_at(point: str, folder: Path, *given: str) -> int:
    """The exit code of a job of two ranks of which rank 1 breaks at this point, with these settings."""
    (folder / "config.toml").write_text(CONFIG)
    settings = [part for one in (f"data.workers={int(point == 'the data')}", *given) for part in ("--set", one)]
    told = {"POINT": point, "RANK_TO_BREAK": "1", "POINT_FOLDER": str(folder)}
    with patch.dict(os.environ, told):
        return launch(
            ["train", str(folder / "config.toml"), "--run", str(folder / "run"), *settings],
            num_ranks=2,
            max_restarts=3,
            folder=folder / "run",
        )


def check_broken(point: str, folder: Path, *, code: int, errors: str) -> None:
    """The job ended as it must; just now."""
    ended = time.time()
    assert SHOWN[point] in errors.splitlines()[0], errors
    assert code == (2 if point == "the model" else 1)
    assert "restart" not in errors, "it would break again"
    # Until then rank 1 writes into its log, its traceback last.
    assert ended - (folder / "run/logs/rank-1.txt").stat().st_mtime < 25.0
    assert left_with(f"POINT_FOLDER={folder}") == []


# A rank that breaks in forward is also that of the test below, which runs out of memory there.
@pytest.mark.parametrize("point", whole("the data", "the model", "forward", "backward", "the optimizer"))
def test_a_rank_that_breaks_in_training_is_the_one_that_is_shown(
    point: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = broken_at(point, tmp_path)
    check_broken(point, tmp_path, code=code, errors=capfd.readouterr().err)


@pytest.fixture(scope="module")
def out_of_memory(tmp_path_factory: pytest.TempPathFactory, forked_ranks: None) -> tuple[Path, str]:
    """A job of which rank 1 runs out of memory in the forward of step 3: its folder, and what the user saw."""
    folder = tmp_path_factory.mktemp("memory")
    with redirect_stderr(StringIO()) as errors:
        assert broken_at("memory", folder) == 1
    assert ranks_left() == []
    return folder, errors.getvalue()


def test_a_rank_that_runs_out_of_memory_tells_what_was_held_what_was_predicted_and_what_to_change(
    out_of_memory: tuple[Path, str],
) -> None:
    first, *_, ledger, held, _, predicted, fits, below = out_of_memory[1].splitlines()
    assert first.startswith("rank 1 failed first (step 3, blocks.1): OutOfMemoryError: CUDA out of memory.")
    assert ledger == "rank 1 ran out of memory in step 3, forward, in forward blocks.1"
    assert held.startswith("  held then: params ")
    assert predicted.startswith("  predicted for this plan: ")
    assert "activations " in predicted
    assert fits.startswith("  needs less: plan.")
    assert below.startswith("what each rank wrote: ")


def test_the_autopsy_of_its_run_folder_names_a_rank_that_raised_in_training(
    out_of_memory: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = out_of_memory[0] / "run"
    first, *others = verdict(read_records(run))
    assert (first.kind, first.ranks) == (FAILED, (1,))
    assert first.text.startswith("rank 1 failed (OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB): ")
    assert ": at step 3, forward, in forward blocks.1; next in its step program: " in first.text
    assert any("rank 0 waited in" in other.text or "rank 0 waits for it" in other.text for other in others)
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        main(["autopsy", str(run)])
    assert first.text in capsys.readouterr().out


def test_a_run_that_may_change_its_plan_starts_again_under_a_smaller_one_from_its_snapshot(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ("train.survive=1", "checkpoint.memory=true", "checkpoint.memory_every=1", "checkpoint.every=0")
    assert broken_at("memory once", tmp_path, *given) == 0
    errors = capfd.readouterr().err
    first, ledger, held, *_ = errors.splitlines()
    assert first.startswith("rank 1 failed first (step 3, blocks.1): OutOfMemoryError: CUDA out of memory.")
    assert first.endswith("; restart 1 of 3")
    assert ledger == "rank 1 ran out of memory in step 3, forward, in forward blocks.1"
    assert held.startswith("  held then: params ")
    assert "  the next start resumes under a smaller plan, from the newest state" in errors
    record = json.loads((tmp_path / "run" / "auto.json").read_text())
    assert record["said"].startswith("rank 1 ran out of memory in step 3, forward, in forward blocks.1; since then ")
    assert Plan.from_dict(record["plan"]) == Plan.load(tmp_path / "run" / "plan.toml")
    written = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert written == list(range(1, 9))


@pytest.fixture(scope="module")
def failing_disk(tmp_path_factory: pytest.TempPathFactory, forked_ranks: None) -> tuple[Path, str]:
    """A job whose disk is full in its first start and fails in its second: its run folder, and what the user saw."""
    folder = tmp_path_factory.mktemp("disk")
    with redirect_stderr(StringIO()) as errors:
        assert broken_at("the disk", folder) == 0
    assert ranks_left() == []
    return folder / "run", errors.getvalue()


@pytest.mark.parametrize(
    ("error", "restart"),
    [
        pytest.param(
            "[Errno 28] No space left on device", 1, marks=pytest.mark.ledger("disk-full", outcome="right"), id="full"
        ),
        pytest.param(
            "[Errno 5] Input/output error", 2, marks=pytest.mark.ledger("disk-error", outcome="right"), id="bad"
        ),
    ],
)
def test_a_disk_that_fails_in_a_save_starts_the_ranks_again_and_leaves_nothing_half_written(
    error: str, restart: int, failing_disk: tuple[Path, str]
) -> None:
    run, errors = failing_disk
    first, second = (line for line in errors.splitlines() if "DiskFailed" in line)
    # All ranks raise it, and whose is the first differs from run to run.
    shown = say((first, second)[restart - 1].partition(" failed first: ")[2])
    assert (
        shown
        == f"DiskFailed: the checkpoint of step 2 was not written: rank 1: OSError: {error}; restart {restart} of 3"
    )
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step-00000006", "step-00000008"]
