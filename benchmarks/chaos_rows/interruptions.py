"""Rows 3, 18 and 21: kill -9 at random moments, about every 20 seconds, and with snapshots in memory.

benchmarks/kills.py and benchmarks/recovery.py do the killing.
"""

import time

import kills
import recovery
from kills_run import JOBS, MICRO_BATCH, Job, Run, running, write_config
from kills_task import NUM_SAMPLES
from scorecard import Asked, Tally

_SECONDS_BETWEEN_KILLS = (15.0, 25.0)
# The most that a pass of the slow run takes; half of it on average, and the slower of two ranks two thirds.
_PASS_SECONDS = 0.4
_STEP_SECONDS = _PASS_SECONDS * 2 / 3
_STEPS_PER_EPOCH = NUM_SAMPLES // (MICRO_BATCH * 2)


def random_moments(asked: Asked) -> Tally:
    tally = Tally()
    # Starting ranks is what takes the time.
    ranks = list(JOBS)[: None if asked.long else 2]
    total = asked.pick(short=4, long=50)
    tally.found["runs"] = 0
    with tally.trying("a run", count=0):
        for _, hits in kills.killed_runs(ranks, num_kills=total, folder=asked.folder, chance=asked.chance):
            tally.tried += hits
            tally.held += hits
            tally.found["runs"] += 1
    return tally


def every_20_seconds(asked: Asked) -> Tally:
    """One run, killed all the time; its last losses and weights against a run left alone, which does not sleep."""
    tally = Tally()
    period = asked.pick(short=45, long=600)
    epochs = max(1, round(0.7 * period / _STEP_SECONDS / _STEPS_PER_EPOCH))
    config = write_config(asked.folder, epochs=epochs, checkpoint_every=10)
    # With AdamW a step more or less than it should be shows in every weight.
    job = Job(num_ranks=2, strategy="fsdp", optimizer="adamw")
    reference = kills.left_alone(job, config=config, folder=asked.folder, pass_seconds=0.0)
    with tally.trying("the run", count=0):
        with running(job, config=config, folder=asked.folder / "killed", pass_seconds=_PASS_SECONDS) as run:
            begun = time.monotonic()
            tally.tried = _kill_steadily(run, period=period, asked=asked)
            share = run.useful_seconds() / (time.monotonic() - begun)
            kills.compare(run.result(), reference, job=job)
        tally.held = tally.tried
        tally.found |= {"steps": len(reference.steps), "share of useful time": f"{share:.0%}"}
    return tally


def from_memory(asked: Asked) -> Tally:
    """Kills of one of 4 ranks that keep snapshots in memory; each must cost less than 10 s and about k steps."""
    tally = Tally()
    num_kills = asked.pick(short=4, long=30)
    with tally.trying("the runs", count=0):
        done = recovery.killed(
            num_kills, folder=asked.folder, chance=asked.chance, epochs=asked.pick(short=30, long=60)
        )
        tally.tried = len(done)
        # k + c − 1 (state/recovery/cadence.py), where copies take up to c = 2 steps next to 4 ranks on 2 cores.
        tally.held = sum(kill.seconds <= 10 and kill.steps_again <= kill.every + 1 for kill in done)
        tally.found |= recovery.summary(done)
    return tally


def _kill_steadily(run: Run, *, period: float, asked: Asked) -> int:
    """Return the number of kills."""
    end = time.monotonic() + period
    num_kills = 0
    while (left := end - time.monotonic()) > 0 and not run.ended():
        time.sleep(min(left, asked.chance.uniform(*_SECONDS_BETWEEN_KILLS)))
        if time.monotonic() < end and not run.ended():
            num_kills += kills.kill(run, "a rank", chance=asked.chance) is not None
    return num_kills
