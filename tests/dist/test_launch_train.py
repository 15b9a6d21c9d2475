"""`shardwise train` on two ranks, one of which breaks somewhere: the user sees where, and nothing is left running."""

import time
from pathlib import Path

import pytest
from processes import processes_with
from whole import whole

from shardwise.launch.launch import launch

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
    "the disk": "CheckpointError: the checkpoint of step 2 was not written: rank 1: OSError: [Errno 28] No space left",
}


@pytest.mark.parametrize("point", ["the data", "forward", "the disk", *whole("the model", "backward", "the optimizer")])
def test_a_rank_that_breaks_in_training_is_the_one_that_is_shown(
    point: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    for name, value in {"POINT": point, "RANK_TO_BREAK": "1", "POINT_FOLDER": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    settings = ["--set", f"data.workers={int(point == 'the data')}"]
    code = launch(
        ["train", str(tmp_path / "config.toml"), "--run", str(tmp_path / "run"), *settings],
        num_ranks=2,
        max_restarts=3,
        folder=tmp_path / "run",
    )
    ended = time.time()
    errors = capfd.readouterr().err
    assert SHOWN[point] in errors.splitlines()[0]
    assert code == (2 if point in ("the model", "the disk") else 1)
    assert "restart" not in errors, "it would break again"
    # Until then rank 1 writes into its log, its traceback last.
    assert ended - (tmp_path / "run/logs/rank-1.txt").stat().st_mtime < 10.0
    assert processes_with(f"POINT_FOLDER={tmp_path}") == []
