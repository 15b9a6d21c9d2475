"""Runs a bench: the same training under several engines and strategies, in turn. No torch here until ranks start.

    round 1   every case once, with details     ──▶ gate: stop unless all did the same training
    silent    every case once without communication (with several ranks): the time of a step that waits for nothing
    round 2 … every case once more, each round beginning with another case

Each run uses fresh processes. After each run, bench.json holds the results so far.
"""

import json
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from shardwise.measure.bench.case import Case, Ranks
from shardwise.measure.bench.equivalence import compare
from shardwise.measure.bench.recommendation import recommended
from shardwise.measure.bench.results import FILE, Bench, InvalidBench
from shardwise.measure.bench.run_files import ASKED, BenchRun, Found
from shardwise.training.config.config import TrainConfig

RUNS = "runs"
PROGRAM = "shardwise.measure.bench.worker"
_MOST_BLOCKS = 4
_MOST_LETTERS = 300


class RunFailed(Exception):  # noqa: N818
    """A rank of a run failed; the message is its own, in one line."""


class BenchStopped(Exception):  # noqa: N818
    """The bench was stopped by a signal; the results so far are in its folder."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.number = number


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request for a bench.

    cases          in the order of the table; one with `why_not` is not run
    steps          timed in each run, rounded up to blocks of equal length
    keep_going     continue after round 1 even if cases did not do the same training
    capacity_bytes, scaling    as in Bench
    """

    config: TrainConfig
    cases: Sequence[Case]
    num_ranks: int
    folder: Path
    name: str
    command: str
    rounds: int = 3
    warm_up: int = 5
    steps: int = 20
    keep_going: bool = False
    overwrite: bool = False
    capacity_bytes: int | None = None
    scaling: tuple[Mapping[str, Any], ...] = ()

    @property
    def blocks(self) -> int:
        return min(_MOST_BLOCKS, self.steps)

    @property
    def block_steps(self) -> int:
        return math.ceil(self.steps / self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One run: a case in a round ("round-1", "silent", "round-2" …)."""

    round: str
    case: Case

    @property
    def silent(self) -> bool:
        return self.round == "silent"

    @property
    def detailed(self) -> bool:
        return self.round == "round-1"

    @property
    def folder_name(self) -> str:
        return f"{self.round}-{self.case.engine}-{self.case.strategy}"

    def __str__(self) -> str:
        return f"{self.round.replace('-', ' ')}: {self.case.name}"


RunRanks = Callable[[BenchRun, Path], Ranks]
OnProgress = Callable[[int, int, str], None]
"""Called with the number of complete runs, the number of all runs, and the next run in words."""


def turns(cases: Sequence[Case], *, rounds: int, num_ranks: int) -> list[Turn]:
    """Return all runs in order: the cases are interleaved, and each round begins with another one."""
    able = [case for case in cases if not case.why_not]
    silent = ["silent"] if num_ranks > 1 else []
    names = ["round-1", *silent, *(f"round-{number}" for number in range(2, rounds + 1))]
    return [
        Turn(round=name, case=case)
        for shift, name in enumerate(names)
        for case in (*able[shift % len(able) :], *able[: shift % len(able)])
    ]


def bench(
    asked: Asked, *, on_progress: OnProgress = lambda done, total, text: None, run: RunRanks | None = None
) -> Bench:
    """Run all cases; one that fails is left out of later rounds.

    Raises BenchStopped after ^C or SIGTERM. `run` starts the ranks of one run and waits for them.
    """
    check(asked)
    _claim(asked.folder)
    run = run or partial(run_ranks, num_ranks=asked.num_ranks)
    todo = turns(asked.cases, rounds=asked.rounds, num_ranks=asked.num_ranks)
    made = datetime.now(UTC).isoformat(timespec="seconds")
    found = _found(asked, made=made, unfinished=f"Unfinished: 0 of {len(todo)} runs.")
    found.save(asked.folder)
    with _stoppable():
        for done, turn in enumerate(todo):
            if not turn.detailed and not asked.keep_going and not found.equivalence.agrees:
                break
            if turn.case.why_not:
                continue
            on_progress(done, len(todo), str(turn))
            _take_turn(turn, asked=asked, run=run)
            found = _found(asked, made=made, unfinished=f"Unfinished: {done + 1} of {len(todo)} runs.")
            found.save(asked.folder)
    on_progress(len(todo), len(todo), "done")
    found = recommended(found)
    found.save(asked.folder)
    return found


def _take_turn(turn: Turn, *, asked: Asked, run: RunRanks) -> None:
    """Do one run, and add its result, or why it failed, to its case."""
    wanted = BenchRun(
        config=replace(asked.config, plan=turn.case.plan),
        engine=turn.case.engine,
        warm_up=asked.warm_up,
        blocks=asked.blocks,
        block_steps=asked.block_steps,
        silent=turn.silent,
        detailed=turn.detailed,
        started=time.time(),
    )
    try:
        ranks = run(wanted, asked.folder / RUNS / turn.folder_name)
    except RunFailed as error:
        if turn.silent:
            # The measurements with communication remain valid.
            turn.case.why_not_silent = str(error)
        else:
            turn.case.fail(str(error))
        return
    (turn.case.silent if turn.silent else turn.case.runs).append(ranks)


def _found(asked: Asked, *, made: str, unfinished: str) -> Bench:
    """Return the results so far, without a recommendation."""
    cases = tuple(case.result() for case in asked.cases)
    firsts = [case.runs[0][0] for case in asked.cases if case.runs]
    first = firsts[0] if firsts else None
    # Each engine adds the version of its package.
    machine = {name: value for found in firsts for name, value in found.environment.items()}
    return Bench(
        name=asked.name,
        command=asked.command,
        made=made,
        num_ranks=asked.num_ranks,
        step_samples=0 if first is None else first.step_samples,
        step_tokens=None if first is None else first.step_tokens,
        settings=_settings(asked),
        machine={**machine, "num_ranks": asked.num_ranks},
        cases=cases,
        equivalence=compare(cases, precision=asked.config.plan.precision),
        why=unfinished,
        capacity_bytes=asked.capacity_bytes,
        scaling=asked.scaling,
    )


# Settings of a config that a bench does not use, or that differ between cases.
_UNUSED = (
    "run.", "checkpoint.", "train.eval", "train.log_every", "plan.strategy", "plan.engine", "plan.capture",
    "plan.compile",
)  # fmt: skip


def _settings(asked: Asked) -> dict[str, Any]:
    flat = {
        f"{section}.{key}": value
        for section, table in asked.config.to_dict().items()
        for key, value in table.items()
        if not f"{section}.{key}".startswith(_UNUSED)
    }
    steps = asked.blocks * asked.block_steps
    return {**flat, "bench.rounds": asked.rounds, "bench.warm_up": asked.warm_up, "bench.steps": steps}


def check(asked: Asked) -> None:
    """Raise InvalidBench if the bench cannot start."""
    if all(case.why_not for case in asked.cases):
        reasons = "; ".join(dict.fromkeys(case.why_not for case in asked.cases))
        raise InvalidBench(f"nothing is left to run: {reasons}")
    if (asked.folder / FILE).exists() and not asked.overwrite:
        raise InvalidBench(f"{asked.folder} holds a bench already: choose another --out, or --overwrite")


def _claim(folder: Path) -> None:
    """Make the folder, and remove an older bench from it, whose runs could be taken for new ones."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).unlink(missing_ok=True)
        # Only what a bench has made: the folder, and runs/ in it, may hold other files.
        for asked in (folder / RUNS).glob(f"*/{ASKED}"):
            shutil.rmtree(asked.parent)
    except OSError as error:
        raise InvalidBench(f"{folder}: cannot be written ({error.strerror}): choose another --out") from error


def run_ranks(wanted: BenchRun, folder: Path, *, num_ranks: int) -> list[Found]:
    """Start the ranks of one run as fresh processes, and read their result files."""
    from shardwise.training.launch.agent import JobFailed, JobStopped
    from shardwise.training.launch.launch import run_job

    folder.mkdir(parents=True)
    (folder / ASKED).write_text(json.dumps(wanted.to_data()), encoding="utf-8")
    try:
        # Without grace: the ranks have nothing to save.
        stopped_by = run_job(
            (str(folder),), num_ranks=num_ranks, max_restarts=0, folder=folder, grace_seconds=0.0, program=PROGRAM
        )
    except JobFailed as end:
        what = " ".join(end.failure.what.split())
        raise RunFailed(f"rank {end.failure.rank}: {what[:_MOST_LETTERS]}") from end
    except JobStopped as end:
        raise BenchStopped(end.number) from end
    if stopped_by is not None:
        raise BenchStopped(stopped_by)
    return [Found.load(folder, rank=rank) for rank in range(num_ranks)]


@contextmanager
def _stoppable() -> Iterator[None]:
    """Raise BenchStopped on ^C and SIGTERM, also between two runs. Does nothing outside the main thread."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise BenchStopped(signal.Signals(number))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
