"""The exported sbatch script on a real SLURM: `make slurm-test` (Debian: slurm-wlm; as root)."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_here import Slurm, is_installed, slurm_here

from shardwise.doors.interchange.exported import JobShape
from shardwise.doors.interchange.targets import export, write
from shardwise.plan import Plan

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not is_installed(), reason="needs SLURM (slurm-wlm) and root"),
]
CONFIG = """
[task]
model = "gpt-tiny"
seq = 16
dataset = "random"
[train]
steps = {steps}
[checkpoint]
every = 10
[run]
device = "cpu"
tensorboard = false
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_here(tmp_path_factory.mktemp("slurm")) as found:
        yield found


def until(condition: Callable[[], bool], *, seconds: float, told: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(0.3)


def losses(run: Path) -> dict[int, float]:
    """Step → loss, of what was trained last."""
    rows = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def submitted(slurm: Slurm, folder: Path, *, steps: int, command: tuple[str, ...] = ()) -> str:
    """The number of a job of two tasks, by the exported script."""
    write(
        export(Plan(strategy="fsdp", micro_batch=2), JobShape(ranks_per_node=2, has_gpus=False), target="slurm"),
        folder=folder,
    )
    (folder / "train.toml").write_text(CONFIG.format(steps=steps))
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    variables = {"PATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return slurm.run("sbatch", "--parsable", "job.sbatch", *command, folder=folder, **variables)


def log(folder: Path) -> str:
    return "".join(path.read_text(errors="replace")[-3000:] for path in folder.glob("slurm-*.log"))


def test_a_job_that_is_requeued_resumes_and_has_the_losses_of_one_that_was_not(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    job = submitted(slurm, folder, steps=400)
    run = folder / "runs/slurm"
    until(
        lambda: (run / "metrics.jsonl").exists() and max(losses(run), default=0) >= 20,
        seconds=120,
        told=lambda: slurm.state(job) + log(folder),
    )
    slurm.run("scontrol", "requeue", job, folder=folder)
    until(lambda: slurm.state(job) == "PENDING", seconds=60, told=lambda: slurm.state(job))
    before = max(losses(run))
    assert before < 400, "it ended before it could be requeued"
    # SLURM waits two minutes before a job starts again.
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now", folder=folder)
    until(lambda: slurm.state(job) == "COMPLETED", seconds=200, told=lambda: slurm.state(job) + log(folder))
    command = [sys.executable, "-m", "shardwise", "train", "train.toml", "--plan", "plan.toml", "--run", "once"]
    subprocess.run([*command, "--ranks", "2"], cwd=folder, check=True, capture_output=True, timeout=150)
    assert losses(run) == losses(folder / "once")
    rows = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    steps = [row["step"] for row in rows if "loss" in row]
    # It went on from its last checkpoint, not from the start.
    assert steps.count(1) == 1, steps


def test_bare_srun_starts_a_users_own_script(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "script.py").write_text(
        "import torch, shardwise\n"
        "from shardwise.comm.job.join import joined\n"
        "with joined(torch.device('cpu')):\n"
        "    model = torch.nn.Linear(4, 4)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    shardwise.prepare(model, optimizer, shardwise.Plan.load('plan.toml'))\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()\n"
        "    open(f'rank-{rank}.txt', 'w').write(str(size))\n"
    )
    job = submitted(slurm, folder, steps=1, command=("python", "script.py"))
    until(lambda: slurm.state(job) in ("COMPLETED", "FAILED"), seconds=100, told=lambda: slurm.state(job) + log(folder))
    assert slurm.state(job) == "COMPLETED", log(folder)
    assert [(folder / f"rank-{rank}.txt").read_text() for rank in range(2)] == ["2", "2"]
