"""Exported files run on two processes, as they are."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardwise.doors.interchange.exported import JobShape
from shardwise.doors.interchange.targets import export, write
from shardwise.plan import Plan

TWO = JobShape(ranks_per_node=2, has_gpus=False)
CONFIG = """
[task]
model = "gpt-tiny"
seq = 16
dataset = "random"
[train]
steps = 3
[run]
device = "cpu"
tensorboard = false
"""
ACCELERATE = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
accelerator.backward(model(torch.randn(2, 4)).mean())
optimizer.step()
kind = type(model).__name__
print(f"rank {accelerator.process_index} of {accelerator.num_processes}: {kind}", flush=True)
accelerator.end_training()
"""


def needs(package: str) -> pytest.MarkDecorator:
    """Not importorskip: Lightning sets environment variables when it is imported."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")


def started(command: list[str], *, folder: Path, **variables: str) -> str:
    """What a command printed that ended well."""
    ended = subprocess.run(
        command, cwd=folder, env=outer(variables), capture_output=True, text=True, timeout=150, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def outer(variables: dict[str, str]) -> dict[str, str]:
    """The environment of a command, in which the programs of this Python are found."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    return {**os.environ, "PATH": path, "GLOO_SOCKET_IFNAME": "lo", **variables}


@pytest.mark.whole
@pytest.mark.timeout(200)
def test_torchruns_script_trains_the_plan(tmp_path: Path) -> None:
    plan = Plan(strategy="zero2", micro_batch=2)
    script = write(export(plan, TWO, target="torchrun"), folder=tmp_path / "out")[0]
    (tmp_path / "train.toml").write_text(CONFIG)
    started([str(script)], folder=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "runs/train/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]


@pytest.mark.whole
@pytest.mark.timeout(200)
def test_ranks_of_torchruns_script_save_after_sigusr1(tmp_path: Path) -> None:
    script = write(export(Plan(strategy="zero2", micro_batch=2), TWO, target="torchrun"), folder=tmp_path / "out")[0]
    (tmp_path / "train.toml").write_text(CONFIG.replace("steps = 3", "steps = 100000") + "[checkpoint]\nevery = 0\n")
    metrics = tmp_path / "runs/train/metrics.jsonl"
    with (tmp_path / "printed.txt").open("w") as printed:
        job = subprocess.Popen([str(script)], cwd=tmp_path, env=outer({}), stdout=printed, stderr=printed)
        try:
            while not (metrics.exists() and '"loss"' in metrics.read_text()):
                assert job.poll() is None, (tmp_path / "printed.txt").read_text()
                time.sleep(0.1)
            job.send_signal(signal.SIGUSR1)
            job.wait(timeout=60)
        finally:
            job.kill()
    assert list((tmp_path / "runs/train/checkpoints").glob("step-*")), (tmp_path / "printed.txt").read_text()


@needs("accelerate")
@pytest.mark.whole
@pytest.mark.timeout(200)
def test_accelerates_file_starts_two_processes_with_ddp(tmp_path: Path) -> None:
    config = write(export(Plan(strategy="ddp"), TWO, target="accelerate"), folder=tmp_path)[0]
    (tmp_path / "script.py").write_text(ACCELERATE)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    printed = started([*command, "--main_process_port", "0", "script.py"], folder=tmp_path)
    # Ranks share a pipe, and may write into each other's lines.
    assert all(f"rank {rank} of 2: DistributedDataParallel" in printed for rank in range(2)), printed
