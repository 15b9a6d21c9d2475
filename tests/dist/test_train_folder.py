"""What a run folder protects: checkpoints that are gone, and a job that is already in it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_ranks
from train_tasks import config, lines, reference, trained
from whole import whole

from reliability.said import say
from shardwise.base.errors import ShardwiseError
from shardwise.training.config.config import TrainConfig
from shardwise.training.launch.folder_lock import locked
from shardwise.training.rank_run import train


def refused(rank: int, asked: TrainConfig) -> str:
    try:
        train(asked)
    except ShardwiseError as error:
        return str(error)
    return ""


def damage(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)


GONE = {
    "missing": (shutil.rmtree, "saved step 4, but .*checkpoints is missing; restore or mount it"),
    "empty": (lambda folder: [shutil.rmtree(path) for path in folder.iterdir()], "checkpoints holds no checkpoint"),
    "damaged": (damage, "all its checkpoints are damaged; restore"),
}


@pytest.mark.ledger("checkpoints-gone", outcome="refused")
@pytest.mark.parametrize("how", ["missing", "damaged", *whole("empty")])
def test_without_its_checkpoints_a_run_does_not_start_at_step_0_unless_fresh(tmp_path: Path, how: str) -> None:
    asked = config(tmp_path, train={"steps": 4})
    run_ranks(trained, num_ranks=2, args=(asked,))
    lose, message = GONE[how]
    lose(tmp_path / "checkpoints")
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for told in run_ranks(refused, num_ranks=2, args=(asked,)):
        assert pytest.raises(ShardwiseError, match=message).matches(ShardwiseError(told)), told
        assert "--fresh to start at step 0" in say(told)
        assert "\n" not in told
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    run_ranks(started_fresh, num_ranks=1, args=(asked,))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]


def started_fresh(rank: int, asked: TrainConfig) -> None:
    train(asked, fresh=True)


def test_a_run_that_had_saved_nothing_starts_at_step_0(tmp_path: Path) -> None:
    asked = config(tmp_path, train={"steps": 4})
    run_ranks(trained, num_ranks=1, args=(asked, 2))
    run_ranks(trained, num_ranks=1, args=(asked,))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]


def test_rank_0_refuses_a_folder_that_another_job_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(tmp_path, train={"steps": 2})
    with locked(tmp_path):
        for told in run_ranks(refused, num_ranks=2, args=(asked,)):
            assert f"another job is writing into {tmp_path}: wait for it, or choose another --run" in told
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.ledger("second-job", outcome="refused")
@pytest.mark.parametrize("launcher", ["torchrun", *whole("slurm")])
def test_a_second_job_is_refused_under_every_launcher(tmp_path: Path, launcher: str) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(
        f'[task]\nmodel = "{reference("gpt")}"\n[plan]\nmicro_batch = 2\n[train]\nsteps = 2\n'
        f'[run]\ntensorboard = false\ndevice = "cpu"\nfolder = "{tmp_path / "run"}"\n'
    )
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    slurm = {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "7"}
    each = [torchrun] if launcher == "torchrun" else [{**slurm, "SLURM_PROCID": rank} for rank in "01"]
    command = [sys.executable, "-m", "shardwise", "train", str(path)]
    with locked(tmp_path / "run"):
        tasks = [
            subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.PIPE, text=True)
            for variables in each
        ]
        for task in tasks:
            errors = task.communicate(timeout=90)[1]
            assert task.returncode != 0
            assert "another job is writing into" in say(errors)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
