"""Kills a training again and again, at random moments, and compares what comes out with a run that was left alone.

python benchmarks/kills.py                          50 kills on 2, 3 and 4 ranks
python benchmarks/kills.py --kills 4 --ranks 2      a short one

Each kill is a SIGKILL of one rank, of the launcher, or of all of them; at start-up, in a step, or while a checkpoint is
written. A killed rank is for the launcher to notice; after the others the same command is given again. At the end of
each run its weights, and the loss of each of its steps, must be those of the run left alone, bit by bit. Under SGD one
parameter counts: it moves by the same amount each time that a sample is seen, so all its elements must be equal.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from kills_task import NUM_SAMPLES, PASS_SECONDS, Counting
from torch import Tensor

from shardwise.checkpoint import Checkpoints

NUM_EPOCHS, LR, MICRO_BATCH = 4, 0.125, 2
# Relative weights of what is killed, and when.
VICTIMS = {"a rank": 7, "the launcher": 2, "all": 1}
MOMENTS = {"stepping": 5, "saving": 4, "starting": 1}
LIMIT_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One way to train it."""

    num_ranks: int
    strategy: str
    optimizer: str

    def command(self, config: Path, *, folder: Path) -> list[str]:
        return [
            *(sys.executable, "-m", "shardwise", "train", str(config), "--run", str(folder)),
            *("--nproc", str(self.num_ranks), "--strategy", self.strategy, "--max-restarts", "1000"),
            *("--set", f"optimizer.name={self.optimizer}"),
        ]


JOBS = {
    2: Job(num_ranks=2, strategy="fsdp", optimizer="sgd"),
    3: Job(num_ranks=3, strategy="zero2", optimizer="adamw"),
    4: Job(num_ranks=4, strategy="shard_grad_op", optimizer="sgd"),
}
CONFIG = """
[task]
model = "python:{task}:task"
[plan]
micro_batch = {micro_batch}
units = "class:Sequential"
[optimizer]
lr = {lr}
[schedule]
name = "constant"
[train]
epochs = {epochs}
clip_norm = 0
log_every = 1
[checkpoint]
every = {checkpoint_every}
[run]
device = "cpu"
tensorboard = false
"""


def write_config(folder: Path, *, epochs: int = NUM_EPOCHS, checkpoint_every: int = 3) -> Path:
    """The config of all jobs."""
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
        self.job = job
        self.folder = folder
        self._pass_seconds = pass_seconds
        self._command = job.command(config, folder=folder)
        folder.mkdir()
        self._output = (folder / "output.txt").open("ab")
        self._left_behind: set[Path] = set()
        self.start()

    def start(self) -> None:
        self.launcher = subprocess.Popen(
            self._command,
            stdout=self._output,
            stderr=self._output,
            env=os.environ
            | {
                "KILLS_FOLDER": str(self.folder),
                "KILLS_PASS_SECONDS": str(self._pass_seconds),
                "OMP_NUM_THREADS": "1",
            },
        )

    def ranks(self) -> dict[int, int]:
        """The process of each rank that is there now."""
        found = {}
        with suppress(FileNotFoundError, ProcessLookupError):
            children = Path(f"/proc/{self.launcher.pid}/task/{self.launcher.pid}/children").read_text().split()
            for child in map(int, children):
                with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                    pairs = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
                    found |= {int(pair[5:]): child for pair in pairs if pair.startswith(b"RANK=")}
        return found

    def last_step(self) -> int:
        path = self.folder / "metrics.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        for line in reversed(lines):
            with suppress(ValueError):
                return int(json.loads(line)["step"])
        return 0

    def useful_seconds(self) -> float:
        """The time of the steps that stand in metrics.jsonl, each once, however often it had to be repeated."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        seconds = {}
        for line in lines:
            with suppress(ValueError):
                step = json.loads(line)
                seconds[step["step"]] = step["num_samples"] / step["samples_per_s"]
        return sum(seconds.values())

    def being_saved(self) -> set[Path]:
        """The checkpoints that are being written, less those that a kill has left half-written."""
        return set((self.folder / "checkpoints").glob(".saving-*")) - self._left_behind

    def leave_behind(self) -> None:
        self._left_behind |= self.being_saved()

    def phase(self, pid: int) -> str:
        """What a process is doing."""
        path = self.folder / f"phase-{pid}"
        step = path.read_text() if path.exists() else "starting up"
        return step + (", while a checkpoint is written" if self.being_saved() else "")

    def ended(self) -> bool:
        """Whether it has ended well; any other end that was not our doing is wrong."""
        code = self.launcher.poll()
        if code not in (None, 0):
            raise Wrong(f"the launcher ended with {code}:\n{(self.folder / 'output.txt').read_text()}")
        return code == 0

    def close(self) -> None:
        self.launcher.kill()
        self.launcher.wait()
        self._output.close()

    def result(self) -> Result:
        model = Counting()
        checkpoints = Checkpoints(self.folder / "checkpoints")
        saved = checkpoints.latest()
        if saved is None:
            raise Wrong("there is no good checkpoint at the end")
        checkpoints.load(saved, model)
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return Result(
            weights={name: tensor.clone() for name, tensor in model.state_dict().items()},
            steps=[(line["step"], line["loss"]) for line in lines],
        )


@contextmanager
def running(job: Job, *, config: Path, folder: Path, pass_seconds: float = PASS_SECONDS) -> Iterator[Run]:
    run = Run(job, config=config, folder=folder, pass_seconds=pass_seconds)
    try:
        yield run
    finally:
        run.close()


def wait_until(run: Run, moment: str, *, chance: random.Random) -> bool:
    """Until the moment to kill; False if the run has ended before."""
    begun, first = time.monotonic(), run.last_step()
    delay_seconds, arrived = {
        "stepping": (chance.uniform(0, 0.5), lambda: run.last_step() != first),
        "saving": (chance.uniform(0, 0.005), lambda: bool(run.being_saved())),
        "starting": (chance.uniform(0, 5), lambda: bool(run.ranks())),
    }[moment]
    while not run.ended():
        if arrived():
            time.sleep(delay_seconds)
            return not run.ended()
        if time.monotonic() - begun > LIMIT_SECONDS:
            raise Wrong(f"nothing happened for {LIMIT_SECONDS:g} s:\n{(run.folder / 'output.txt').read_text()}")
        time.sleep(0.002)
    return False


def kill(run: Run, victim: str, *, chance: random.Random) -> str | None:
    """Kill, and start again what the launcher cannot; what was hit, or None if nobody was there."""
    ranks = run.ranks()
    if not ranks:
        return None
    rank = chance.choice(sorted(ranks))
    doing, step = run.phase(ranks[rank]), run.last_step()
    pids = {"a rank": [ranks[rank]], "the launcher": [run.launcher.pid], "all": [*ranks.values(), run.launcher.pid]}
    for pid in pids[victim]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    begun = time.monotonic()
    run.leave_behind()
    if victim != "a rank":
        run.launcher.wait()
        run.start()
    while not run.ended() and run.ranks().get(rank) in (None, ranks[rank]):
        time.sleep(0.005)
    hit = f"rank {rank} of {run.job.num_ranks}" if victim == "a rank" else victim
    return f"{hit} after step {step}, {doing}; a new rank {rank} after {time.monotonic() - begun:.1f} s"


def compare(result: Result, reference: Result, *, job: Job) -> None:
    if result.steps != reference.steps:
        raise Wrong(f"the losses are not those of the run left alone: {result.steps} | {reference.steps}")
    for name, tensor in reference.weights.items():
        if not torch.equal(result.weights[name], tensor):
            raise Wrong(f"{name} is not as in the run left alone: {result.weights[name]} | {tensor}")
    if job.optimizer == "sgd":
        per_sample = LR / (MICRO_BATCH * job.num_ranks)
        expected = torch.full((NUM_SAMPLES,), -per_sample * NUM_EPOCHS)
        torch.testing.assert_close(result.weights["seen"], expected, rtol=1e-6, atol=0)
        if len(set(result.weights["seen"].tolist())) != 1:
            raise Wrong(f"samples were not seen equally often: {result.weights['seen']}")


def left_alone(job: Job, *, config: Path, folder: Path, pass_seconds: float = PASS_SECONDS) -> Result:
    """What the job gives when nobody kills it."""
    with running(job, config=config, folder=folder / "alone", pass_seconds=pass_seconds) as run:
        while not run.ended():
            time.sleep(0.05)
        reference = run.result()
    compare(reference, reference, job=job)
    return reference


def killed_run(
    job: Job,
    *,
    reference: Result,
    num_kills: int,
    config: Path,
    folder: Path,
    chance: random.Random,
    hits: list[str],
) -> None:
    """One run with up to `num_kills` kills, each of which is added to `hits`; Wrong if it ends in other bits."""
    with running(job, config=config, folder=folder) as run:
        while len(hits) < num_kills:
            (moment,) = chance.choices(list(MOMENTS), list(MOMENTS.values()))
            (victim,) = chance.choices(list(VICTIMS), list(VICTIMS.values()))
            if not wait_until(run, moment, chance=chance):
                break
            if (hit := kill(run, victim, chance=chance)) is not None:
                hits.append(hit)
                print(f"  killed {hit}", flush=True)
        while not run.ended():
            time.sleep(0.05)
        compare(run.result(), reference, job=job)


def kill_job(job: Job, *, num_kills: int, config: Path, folder: Path, chance: random.Random) -> int:
    """Runs of one job until `num_kills` have hit; how many runs that took."""
    print(f"{job.num_ranks} ranks, {job.strategy}, {job.optimizer}: a run left alone …", flush=True)
    reference = left_alone(job, config=config, folder=folder)
    done = num_runs = 0
    while done < num_kills:
        num_runs += 1
        hits: list[str] = []
        killed_run(
            job,
            reference=reference,
            num_kills=num_kills - done,
            config=config,
            folder=folder / f"run-{num_runs}",
            chance=chance,
            hits=hits,
        )
        done += len(hits)
        print(f"  run {num_runs}: {len(hits)} kills, {len(reference.steps)} steps, bit-identical", flush=True)
    return num_runs


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="in all, shared out among --ranks")
    parser.add_argument("--ranks", type=lambda text: [int(word) for word in text.split(",")], default=[2, 3, 4])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    num_runs = 0
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        config = write_config(Path(name))
        for index, num_ranks in enumerate(args.ranks):
            num_kills = len(range(index, args.kills, len(args.ranks)))
            folder = Path(name, str(num_ranks))
            folder.mkdir()
            try:
                num_runs += kill_job(JOBS[num_ranks], num_kills=num_kills, config=config, folder=folder, chance=chance)
            except Wrong as error:
                print(f"WRONG: {error}", file=sys.stderr)
                return 1
    print(f"{args.kills} kills in {num_runs} runs (seed {args.seed}): every run bit-identical to the one left alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
