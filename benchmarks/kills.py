"""Kills a training again and again, at random moments, and compares what comes out with a run that was left alone.

python benchmarks/kills.py                          50 kills on 2, 3 and 4 ranks
python benchmarks/kills.py --kills 4 --ranks 2      a short one

Each kill is a SIGKILL of one rank, of the launcher, or of all of them; at start-up, in a step, or while a checkpoint is
written. A killed rank is for the launcher to notice; after the others the same command is given again. At the end of
each run its weights, and the loss of each of its steps, must be those of the run left alone, bit by bit. Under SGD one
parameter counts: it moves by the same amount each time that a sample is seen, so all its elements must be equal.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

import torch
from kills_run import JOBS, LR, MICRO_BATCH, NUM_EPOCHS, Job, Result, Run, Wrong, running, write_config
from kills_task import NUM_SAMPLES, PASS_SECONDS

# Relative weights of what is killed, and when.
VICTIMS = {"a rank": 7, "the launcher": 2, "all": 1}
MOMENTS = {"stepping": 5, "saving": 4, "starting": 1}
LIMIT_SECONDS = 120.0


def wait_until(run: Run, moment: str, *, chance: random.Random) -> bool:
    """Wait until the moment to kill; return False if the run has ended before."""
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
    """Kill, and start again what the launcher cannot; return what was hit, or None if nobody was there."""
    ranks = run.ranks()
    if not ranks:
        return None
    rank = chance.choice(sorted(ranks))
    step, saving = run.last_step(), ", while a checkpoint is written" if run.being_saved() else ""
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
    return f"{hit} after step {step}{saving}; a new rank {rank} after {time.monotonic() - begun:.1f} s"


def compare(result: Result, reference: Result, *, job: Job) -> None:
    if result.steps != reference.steps:
        pairs = list(zip_longest(result.steps, reference.steps))
        other = [pair for pair in pairs if pair[0] != pair[1]]
        raise Wrong(f"{len(other)} of {len(pairs)} losses are not those of the run left alone, first {other[0]}")
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
    """Return what the job gives when nobody kills it."""
    with running(job, config=config, folder=folder / "alone", pass_seconds=pass_seconds) as run:
        reference = run.result()
    compare(reference, reference, job=job)
    return reference


def killed_run(
    job: Job, *, reference: Result, num_kills: int, config: Path, folder: Path, chance: random.Random
) -> int:
    """Run once with up to `num_kills` kills; return how many have hit. Wrong if it ends in other bits."""
    hits = 0
    with running(job, config=config, folder=folder) as run:
        while hits < num_kills:
            (moment,) = chance.choices(list(MOMENTS), list(MOMENTS.values()))
            (victim,) = chance.choices(list(VICTIMS), list(VICTIMS.values()))
            if not wait_until(run, moment, chance=chance):
                break
            if (hit := kill(run, victim, chance=chance)) is not None:
                hits += 1
                print(f"  killed {hit}", flush=True)
        compare(run.result(), reference, job=job)
    return hits


def killed_runs(
    ranks: Sequence[int], *, num_kills: int, folder: Path, chance: random.Random
) -> Iterator[tuple[Job, int]]:
    """Run jobs until `num_kills` have hit, shared out among them; yield each run's job and its kills."""
    config = write_config(folder)
    for index, num_ranks in enumerate(ranks):
        job, place = JOBS[num_ranks], folder / str(num_ranks)
        place.mkdir()
        reference = left_alone(job, config=config, folder=place, pass_seconds=0.0)
        left = len(range(index, num_kills, len(ranks)))
        while left > 0:
            where = place / f"run-{left}"
            hits = killed_run(job, reference=reference, num_kills=left, config=config, folder=where, chance=chance)
            yield job, hits
            left -= max(1, hits)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="in all, shared out among --ranks")
    parser.add_argument("--ranks", type=lambda text: [int(word) for word in text.split(",")], default=[2, 3, 4])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        try:
            chance = random.Random(args.seed)
            for job, hits in killed_runs(args.ranks, num_kills=args.kills, folder=Path(name), chance=chance):
                print(f"{job}: {hits} kills, bit-identical", flush=True)
        except Wrong as error:
            print(f"WRONG: {error}", file=sys.stderr)
            return 1
    print(f"{args.kills} kills (seed {args.seed}): every run is bit-identical to the one left alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
