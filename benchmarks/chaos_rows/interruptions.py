"""Rows 3 and 18: kill -9 at random moments, and about every 20 seconds; benchmarks/kills.py does the killing."""

import time
from dataclasses import dataclass

import kills
from kills_run import JOBS, MICRO_BATCH, Job, Run, running, write_config
from kills_task import NUM_SAMPLES
from scorecard import Asked, Fault, Tally

_SECONDS_BETWEEN_KILLS = (15.0, 25.0)
# The most that a pass of the slow run takes; half of it on average, and the slower of two ranks two thirds.
_PASS_SECONDS = 0.4
_STEP_SECONDS = _PASS_SECONDS * 2 / 3
_STEPS_PER_EPOCH = NUM_SAMPLES // (MICRO_BATCH * 2)


def random_moments(asked: Asked) -> Tally:
    tally = Tally()
    total = asked.pick(short=4, long=50)
    config = write_config(asked.folder)
    num_runs = 0
    # Starting ranks is what takes the time.
    jobs = dict(list(JOBS.items())[: None if asked.long else 2])
    for index, (num_ranks, job) in enumerate(jobs.items()):
        folder = asked.folder / str(num_ranks)
        folder.mkdir()
        reference = kills.left_alone(job, config=config, folder=folder, pass_seconds=0.0)
        left = len(range(index, total, len(jobs)))
        while left > 0:
            num_runs += 1
            hits: list[str] = []
            with tally.trying(f"run {num_runs}, {num_ranks} ranks, {job.strategy}", count=0):
                kills.killed_run(
                    job,
                    reference=reference,
                    num_kills=left,
                    config=config,
                    folder=folder / f"run-{num_runs}",
                    chance=asked.chance,
                    hits=hits,
                )
                tally.held += len(hits)
            tally.tried += len(hits)
            left -= max(1, len(hits))
    tally.found["runs"] = num_runs
    return tally


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyKills:
    """How a run fared under kills: how many, for how long, and how much of that was steps that counted."""

    num_kills: int
    seconds: float
    useful_seconds: float


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
            steady = _kill_steadily(run, period=period, asked=asked)
            tally.tried = steady.num_kills
            while not run.ended():
                time.sleep(0.1)
            kills.compare(run.result(), reference, job=job)
        tally.held = steady.num_kills
        tally.found["steps"] = len(reference.steps)
        tally.found["share of useful time"] = f"{steady.useful_seconds / steady.seconds:.0%}"
    return tally


def _kill_steadily(run: Run, *, period: float, asked: Asked) -> SteadyKills:
    begun = time.monotonic()
    num_kills = 0
    while (left := begun + period - time.monotonic()) > 0 and not run.ended():
        time.sleep(min(left, asked.chance.uniform(*_SECONDS_BETWEEN_KILLS)))
        if time.monotonic() < begun + period and not run.ended():
            hit = kills.kill(run, "a rank", chance=asked.chance)
            num_kills += hit is not None
            print(f"  {time.monotonic() - begun:4.0f} s: {hit}", flush=True)
    return SteadyKills(num_kills=num_kills, seconds=time.monotonic() - begun, useful_seconds=run.useful_seconds())


ROWS = [
    Fault(
        name="3",
        shows="50 × kill -9 of a random rank, of the launcher or of all, at random moments, on 2, 3 and 4 ranks "
        "(short: 4, on 2 and 3 ranks)",
        must_be="final weights bit-identical",
        run=random_moments,
    ),
    Fault(
        name="18",
        shows="a kill of a rank about every 20 s for 10 minutes (short: 45 s)",
        must_be="final loss and weights bit-equal to a clean run; share of useful time published",
        run=every_20_seconds,
    ),
]
