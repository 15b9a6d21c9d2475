"""The progress of this process in its job: written where operations are issued, read by the watchdog's threads.

Each write is a plain assignment without a lock, so a reader may be one operation behind. No torch here.
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
# A call that gathers sharded parameters with all ranks; in errors.
NO_GRAD_FORWARD = "a forward without gradients (generate, an evaluation)"


class RankProgress:
    """The progress of this process, which is one rank of one job.

    step          the number of the current step, or of the next one; taken: how many are complete
    phase         the current phase of the step, or BETWEEN_STEPS
    count         collectives issued in this step
    evaluated     collectives of forwards without gradients since the last step
    kind, unit    the operation that was issued last, as on the tape
    waits_for     the collective that this process waits for, or ""
    lost_in       the collective whose wait failed, or ""
    meeting       the call for which this process waits for all ranks (agreement.meet), or ""
    together      whether the last forward without gradients gathered with all ranks of the job
    """

    def __init__(self) -> None:
        self.restart()
        # Called with the error of a collective; may raise a better one.
        self.explain: Callable[[RuntimeError], None] | None = None
        # Called with the error and the rank that stopped before the watchdog ends this process.
        self.on_stall: Callable[[Exception, int], None] | None = None
        # Called with an error of this process or of a collective; writes a record for `shardwise autopsy`.
        self.leave_record: Callable[[BaseException], None] | None = None

    def restart(self) -> None:
        """Reset to the start of a job, on all ranks at the same point."""
        self.step = 1
        self.taken = 0
        self.phase = BETWEEN_STEPS
        self.count = 0
        self.evaluated = 0
        self.kind: Kind | None = None
        self.unit = ""
        self.waits_for = ""
        self.lost_in = ""
        self.meeting = ""
        self.together = False

    def lose(self, error: BaseException) -> None:
        """Note that a collective failed: a peer or the network is gone."""
        self.lost_in = self.waits_for
        if self.leave_record is not None:
            self.leave_record(error)

    def end_step(self) -> None:
        """Note that the update was issued."""
        self.step += 1
        self.taken += 1
        self.count = 0
        self.phase = BETWEEN_STEPS
        # A program that caught the error of a collective has continued.
        self.lost_in = ""

    def standing(self, rank: int, *, idle_seconds: float) -> "Standing":
        """Return a copy for the other ranks."""
        return Standing(
            rank=rank,
            step=self.step,
            count=self.count,
            evaluated=self.evaluated,
            phase=self.phase,
            last=f"{self.kind.value} {self.unit}" if self.kind is not None else "",
            waits_for=self.waits_for,
            meeting=self.meeting,
            together=self.together,
            idle_seconds=idle_seconds,
        )


PROGRESS = RankProgress()


@contextmanager
def waiting_in(what: str, *, counts: bool = True) -> Iterator[None]:
    """Mark the block as a blocking call. `counts`: all ranks of the job make it, so it is part of their position.

    Threads other than the main one (which write checkpoints) are ignored: they do not block training.
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


@contextmanager
def meeting_in(what: str) -> Iterator[None]:
    """Mark the block as a wait for all ranks to come to `what`."""
    PROGRESS.meeting = what
    try:
        yield
    finally:
        PROGRESS.meeting = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The point that a rank has reached.

    in_barrier       it waits in torch.distributed.barrier()
    idle_seconds     how long it has issued no collective
    silent_seconds   how long its process has not answered, as seen by the reader
    left             it has no prepared model any more: its program has ended, or is about to
    """

    rank: int
    step: int = 1
    count: int = 0
    evaluated: int = 0
    phase: str = BETWEEN_STEPS
    last: str = ""
    waits_for: str = ""
    meeting: str = ""
    together: bool = False
    in_barrier: bool = False
    idle_seconds: float = 0.0
    silent_seconds: float = 0.0
    left: bool = False

    @property
    def position(self) -> tuple[int, int, int]:
        """Equal on all ranks at the same point, and larger at later points."""
        return self.step, self.count, self.evaluated

    def __str__(self) -> str:
        """Describe the step, its phase, and the operation that was issued last or is computing."""
        in_or_after = "in" if self.last.partition(" ")[0] in (FORWARD, BACKWARD) else "after"
        return f"step {self.step}, {self.phase}" + (f", {in_or_after} {self.last}" if self.last else "")
