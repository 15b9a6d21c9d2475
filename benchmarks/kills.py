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
        raise Wrong(f"the losses are not those of the run left alone: {first_difference(result, reference)}")
    for name, tensor in reference.weights.items():
        if not torch.equal(result.weights[name], tensor):
            raise Wrong(f"{name} is not as in the run left alone: {result.weights[name]} | {tensor}")
    if job.optimizer == "sgd":
        per_sample = LR / (MICRO_BATCH * job.num_ranks)
        expected = torch.full((NUM_SAMPLES,), -per_sample * NUM_EPOCHS)
        torch.testing.assert_close(result.weights["seen"], expected, rtol=1e-6, atol=0)
        if len(set(result.weights["seen"].tolist())) != 1:
            raise Wrong(f"samples were not seen equally often: {result.weights['seen']}")


def first_difference(result: Result, reference: Result) -> str:
    """Of the lines of steps: where they part, how many differ, and whether the weights do."""
    pairs = list(zip_longest(result.steps, reference.steps))
    place = next(index for index, (found, wanted) in enumerate(pairs) if found != wanted)
    num_other = sum(found != wanted for found, wanted in pairs)
    same = all(torch.equal(result.weights[name], tensor) for name, tensor in reference.weights.items())
    return (
        f"{len(result.steps)} and {len(reference.steps)} lines, {num_other} differ, first "
        f"{pairs[max(0, place - 1) : place + 2]}; the weights are {'equal' if same else 'not equal'}"
    )


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
