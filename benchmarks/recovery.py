"""Kills ranks of a training that keeps snapshots in memory, and measures what each kill costs.

python benchmarks/recovery.py                       30 kills of one of 4 ranks, at random moments
python benchmarks/recovery.py --kills 5 --seed 7    fewer, others
python benchmarks/recovery.py --cost cpu            the cost per step, on and off in turn: GPT-124M on 4 CPU ranks
python benchmarks/recovery.py --cost h200           the same of Llama-1B on one GPU

A kill is a SIGKILL of a random rank: at any moment, while a snapshot is taken, or while a checkpoint is written. The
end must be bit-equal to that of a run that was left alone. Each kill is measured from the signal to the line "Resuming
after step", after which the next step begins; steps computed again are those between that step and the last one in
metrics.jsonl.
"""

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import kills
from kills_run import Job, Run, Wrong, running, write_config

from shardwise.state.recovery.memory_key import key_in

MOMENTS = {"any": 4, "snapshot": 4, "saving": 2}
LIMIT_SECONDS = 60.0
_JOB = Job(num_ranks=4, strategy="fsdp", optimizer="adamw", settings=("checkpoint.memory=true",))
_RESUMING = re.compile(r"^Resuming after step (\d+)", re.MULTILINE)
_EVERY = re.compile(r"^Snapshots in memory every (\d+) step", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What a kill has cost: seconds until the next step began, steps computed again, and k when it hit."""

    moment: str
    seconds: float
    steps_again: int
    every: int


def wait_for(happened: Callable[[], bool], run: Run, *, what: str) -> bool:
    """Wait until it has happened; return False if the run has ended before."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not happened():
        if run.ended():
            return False
        if time.monotonic() > deadline:
            raise Wrong(f"{what}: nothing for {LIMIT_SECONDS:g} s:\n{output(run)[-2000:]}")
        time.sleep(0.001)
    return True


def output(run: Run) -> str:
    return (run.folder / "output.txt").read_text(errors="replace")


def records(run: Run) -> set[str]:
    """Return the snapshots in memory that are whole."""
    return {path.name for path in Path("/dev/shm", f"shardwise-{key_in(run.folder)}").glob("*.own.json")}


def kill_once(run: Run, *, chance: random.Random) -> Kill | None:
    """Kill a rank and wait until it is made up for; None if the run has ended before."""
    (moment,) = chance.choices(list(MOMENTS), list(MOMENTS.values()))
    seen = records(run)
    step = run.last_step()
    if not wait_for(lambda: run.last_step() > step + 2, run, what="steps"):
        return None
    if moment == "snapshot":
        seen = records(run)
        arrived = wait_for(lambda: not seen <= records(run), run, what="a snapshot")
    elif moment == "saving":
        arrived = wait_for(lambda: bool(run.being_saved()), run, what="a save")
    else:
        time.sleep(chance.uniform(0, 1.0))
        arrived = not run.ended()
    ranks = run.ranks()
    if not arrived or len(ranks) < run.job.num_ranks:
        return None
    starts = len(_RESUMING.findall(output(run)))
    os.kill(ranks[chance.choice(sorted(ranks))], signal.SIGKILL)
    begun, last = time.monotonic(), run.last_step()
    run.leave_behind()
    if not wait_for(lambda: len(_RESUMING.findall(output(run))) > starts, run, what="a restart"):
        return None
    seconds = time.monotonic() - begun
    resumed = int(_RESUMING.findall(output(run))[-1])
    every = int((_EVERY.findall(output(run)) or ["0"])[-1])
    return Kill(moment=moment, seconds=seconds, steps_again=max(0, last - resumed), every=every)


def killed(num_kills: int, *, folder: Path, chance: random.Random, epochs: int = 60) -> list[Kill]:
    """Kill ranks so many times, in as many runs as it takes; each must end as the one that is left alone."""
    config = write_config(folder, epochs=epochs, checkpoint_every=25)
    reference = kills.left_alone(_JOB, config=config, folder=folder, pass_seconds=0.0)
    done: list[Kill] = []
    while len(done) < num_kills:
        with running(_JOB, config=config, folder=folder / f"run-{len(done)}", pass_seconds=0.15) as run:
            while len(done) < num_kills and (kill := kill_once(run, chance=chance)) is not None:
                done.append(kill)
                print(f"  {kill}", flush=True)
            kills.compare(run.result(), reference, job=_JOB)
    return done


def summary(done: list[Kill]) -> dict[str, str]:
    seconds, again = [kill.seconds for kill in done], [kill.steps_again for kill in done]
    return {
        "seconds until the next step": f"median {median(seconds):.1f}, at most {max(seconds):.1f}",
        "steps computed again": f"median {median(again):g}, at most {max(again)}",
        "k": f"{min(kill.every for kill in done)} to {max(kill.every for kill in done)}",
        "kills that cost less than k steps": f"{sum(kill.steps_again < kill.every for kill in done)}; "
        f"k: {sum(kill.steps_again == kill.every for kill in done)}; "
        f"more: {sum(kill.steps_again > kill.every for kill in done)}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost", choices=["cpu", "h200"], help="measure the cost per step of a case instead")
    parser.add_argument("--rounds", type=int, default=6, help="of --cost: pairs of on and off")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        if args.cost:
            from recovery_cost import measure

            measure(args.cost, Path(name), num_rounds=args.rounds)
            return 0
        try:
            done = killed(args.kills, folder=Path(name), chance=random.Random(args.seed))
        except Wrong as error:
            print(f"WRONG: {error}", file=sys.stderr)
            return 1
    for what, value in summary(done).items():
        print(f"{what}: {value}")
    print(f"{len(done)} kills (seed {args.seed}): every run is bit-identical to the one left alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
