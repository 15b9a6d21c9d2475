"""The trainings that benchmarks/kills.py kills: jobs, their config, and one run in one folder."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kills_task import PASS_SECONDS, Counting
from torch import Tensor

from shardwise.checkpoint import Checkpoints

NUM_EPOCHS, LR, MICRO_BATCH = 4, 0.125, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One way to train it."""

    num_ranks: int
    strategy: str
    optimizer: str
    settings: tuple[str, ...] = ()


JOBS = {
    2: Job(num_ranks=2, strategy="fsdp", optimizer="sgd"),
    3: Job(num_ranks=3, strategy="zero2", optimizer="adamw"),
    4: Job(num_ranks=4, strategy="shard_grad_op", optimizer="sgd"),
}
CONFIG = """
task = {{ model = "python:{task}:task" }}
plan = {{ micro_batch = {micro_batch}, units = "class:Sequential" }}
optimizer = {{ lr = {lr} }}
schedule = {{ name = "constant" }}
train = {{ epochs = {epochs}, clip_norm = 0, log_every = 1 }}
checkpoint = {{ every = {checkpoint_every} }}
run = {{ device = "cpu", tensorboard = false }}
"""


def write_config(folder: Path, *, epochs: int = NUM_EPOCHS, checkpoint_every: int = 3) -> Path:
    """Write the config of all jobs."""
    task = Path(__file__).resolve().with_name("kills_task.py")
    path = folder / "kills.toml"
    path.write_text(
        CONFIG.format(task=task, micro_batch=MICRO_BATCH, lr=LR, epochs=epochs, checkpoint_every=checkpoint_every)
    )
    return path


class Wrong(Exception):  # noqa: N818 - what is wrong with the project, not with this script
    """A run did not come out as it must."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run leaves: its weights, and the loss of each step as it stands in metrics.jsonl."""

    weights: dict[str, Tensor]
    steps: list[tuple[int, float]]


class Run:
    """One training in one folder, started as often as it takes."""

    def __init__(self, job: Job, *, config: Path, folder: Path, pass_seconds: float) -> None:
        self.job, self.folder = job, folder
        variables = {"KILLS_PASS_SECONDS": str(pass_seconds), "OMP_NUM_THREADS": "1"}
        self._environment = os.environ | variables
        self._command = [
            *(sys.executable, "-m", "shardwise", "train", str(config), "--run", str(folder)),
            *("--ranks", str(job.num_ranks), "--strategy", job.strategy, "--max-restarts", "1000"),
            *(word for setting in (f"optimizer.name={job.optimizer}", *job.settings) for word in ("--set", setting)),
        ]
        folder.mkdir()
        self._output = (folder / "output.txt").open("ab")
        self._left_behind: set[Path] = set()
        self.start()

    def start(self) -> None:
        self.launcher = subprocess.Popen(self._command, stdout=self._output, stderr=self._output, env=self._environment)

    def ranks(self) -> dict[int, int]:
        """Return the process of each rank that is there now."""
        found = {}
        with suppress(FileNotFoundError, ProcessLookupError):
            children = Path(f"/proc/{self.launcher.pid}/task/{self.launcher.pid}/children").read_text().split()
            for child in map(int, children):
                with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                    # Ranks name themselves: a forked one has another's environment here.
                    name, _, rank = Path(f"/proc/{child}/comm").read_text().strip().partition(" ")
                    found |= {int(rank): child} if name == "shardwise" and rank.isdigit() else {}
        return found

    def steps(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl that are whole."""
        path = self.folder / "metrics.jsonl"
        lines = []
        for line in path.read_bytes().splitlines() if path.exists() else []:
            with suppress(ValueError):
                lines.append(json.loads(line))
        return lines

    def last_step(self) -> int:
        steps = self.steps()
        return steps[-1]["step"] if steps else 0

    def useful_seconds(self) -> float:
        """Return the time of the steps that stand in metrics.jsonl, each once, however often it had to be repeated."""
        return sum({step["step"]: step["num_samples"] / step["samples_per_s"] for step in self.steps()}.values())

    def being_saved(self) -> set[Path]:
        """Return the checkpoints that are being written, less those that a kill has left half-written."""
        return set((self.folder / "checkpoints").glob(".saving-*")) - self._left_behind

    def leave_behind(self) -> None:
        self._left_behind |= self.being_saved()

    def ended(self) -> bool:
        """Return whether it has ended well; any other end that was not our doing is wrong."""
        code = self.launcher.poll()
        if code not in (None, 0):
            raise Wrong(f"the launcher ended with {code}:\n{(self.folder / 'output.txt').read_text()}")
        return code == 0

    def close(self) -> None:
        self.launcher.kill()
        self.launcher.wait()
        self._output.close()

    def result(self) -> Result:
        """Wait for the end, and return what there is then."""
        while not self.ended():
            time.sleep(0.05)
        model = Counting()
        checkpoints = Checkpoints(self.folder / "checkpoints")
        saved = checkpoints.latest()
        if saved is None:
            raise Wrong("there is no good checkpoint at the end")
        checkpoints.load(saved, model)
        return Result(
            weights={name: tensor.clone() for name, tensor in model.state_dict().items()},
            steps=[(line["step"], line["loss"]) for line in self.steps()],
        )


@contextmanager
def running(job: Job, *, config: Path, folder: Path, pass_seconds: float = PASS_SECONDS) -> Iterator[Run]:
    run = Run(job, config=config, folder=folder, pass_seconds=pass_seconds)
    try:
        yield run
    finally:
        run.close()
