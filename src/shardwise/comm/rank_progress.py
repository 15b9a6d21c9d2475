"""How far this process has come in its job: written where operations are issued, read by the watchdog's threads.

Written without a lock, a plain assignment each: a reader may see a position that is one operation old. No torch here.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shardwise.program import Kind

BETWEEN_STEPS = "between steps"
FORWARD = "forward"
BACKWARD = "backward"
UPDATE = "update"
EVALUATION = "evaluation"


class RankProgress:
    """A process is one rank of one job, so there is one of them.

    step          the number of the step that is under way, or comes next; taken: how many are over
    phase         what the step, or what is between two steps, is at
    count         collectives that were issued in this step
    evaluated     collectives of forwards without gradients since the last step
    kind, unit    the operation that was issued last, as the tape would note it
    waits_for     the collective in whose wait this process is, "" for none
    lost_in       the collective whose wait failed, "" for none
    """

    __slots__ = (
        *("count", "evaluated", "explain", "kind", "leave_record", "lost_in", "on_stall", "phase", "step", "taken"),
        *("unit", "waits_for"),
    )

    def __init__(self) -> None:
        self.restart()
        # Called with a collective's error: may raise a better one.
        self.explain: Callable[[RuntimeError], None] | None = None
        # Called with (error, rank that stopped) before the watchdog ends this process.
        self.on_stall: Callable[[Exception, int], None] | None = None
        # Called with an error that ends this process, or a collective of it: leaves a record for `shardwise autopsy`.
        self.leave_record: Callable[[BaseException], None] | None = None

    def restart(self) -> None:
        """All ranks are at one point, before their first step."""
        self.step = 1
        self.taken = 0
        self.phase = BETWEEN_STEPS
        self.count = 0
        self.evaluated = 0
        self.kind: Kind | None = None
        self.unit = ""
        self.waits_for = ""
        self.lost_in = ""

    def lose(self, error: BaseException) -> None:
        """A collective has failed: a peer is gone, or the network."""
        self.lost_in = self.waits_for
        if self.leave_record is not None:
            self.leave_record(error)

    def end_step(self) -> None:
        """The update is issued, with what follows on it."""
        self.step += 1
        self.taken += 1
        self.count = 0
        self.phase = BETWEEN_STEPS
        # Whoever caught the error of a collective has gone on.
        self.lost_in = ""

    def standing(self, rank: int, *, idle_seconds: float) -> "Standing":
        """A copy, for the others."""
        return Standing(
            rank=rank,
            step=self.step,
            count=self.count,
            evaluated=self.evaluated,
            phase=self.phase,
            last=f"{self.kind.value} {self.unit}" if self.kind is not None else "",
            waits_for=self.waits_for,
            idle_seconds=idle_seconds,
        )


PROGRESS = RankProgress()


@contextmanager
def waiting_in(what: str, *, counts: bool = True) -> Iterator[None]:
    """A blocking call that all ranks make. `counts`: all of the job, so that it is part of their position.

    A thread other than the main one (a checkpoint that is written) holds up nobody.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    PROGRESS.count += counts
    PROGRESS.waits_for = what
    try:
        yield
    except RuntimeError as error:
        PROGRESS.lose(error)
        raise
    finally:
        PROGRESS.waits_for = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a rank stands.

    idle_seconds     for how long it has issued no collective
    silent_seconds   for how long its process has not answered, as the reader sees it
    left             it has no prepared model any more: its program is over, or about to be
    """

    rank: int
    step: int = 1
    count: int = 0
    evaluated: int = 0
    phase: str = BETWEEN_STEPS
    last: str = ""
    waits_for: str = ""
    idle_seconds: float = 0.0
    silent_seconds: float = 0.0
    left: bool = False

    @property
    def position(self) -> tuple[int, int, int]:
        """The same on all ranks at the same point, and larger further on."""
        return self.step, self.count, self.evaluated

    def __str__(self) -> str:
        """The step, what it is at, and the operation that was issued last, or is computing."""
        in_or_after = "in" if self.last.partition(" ")[0] in (FORWARD, BACKWARD) else "after"
        return f"step {self.step}, {self.phase}" + (f", {in_or_after} {self.last}" if self.last else "")
