"""Measures how fast this rank makes progress, and how long the watchdog should wait accordingly."""

import time

from shardwise.comm.groups.rank_progress import PROGRESS

# During the first steps, in which compilers may run, the limit is longer by this factor.
_FIRST_STEPS = 2
_FIRST_FACTOR = 4.0
# The limit is at least this many times the slowest of the last steps.
_NUM_STEPS = 8
_STEP_FACTOR = 3.0


class Pace:
    """Measures, each time `note` is called, how long nothing was issued and how long the last steps took."""

    def __init__(self) -> None:
        self.position = (0, 0, 0)
        self._since = self._step_since = time.monotonic()
        self._step_seconds: list[float] = []
        self._taken = 0

    def note(self) -> None:
        position, taken = (PROGRESS.step, PROGRESS.count, PROGRESS.evaluated), PROGRESS.taken
        now = time.monotonic()
        if taken != self._taken:
            # The first step compiles and learns, and does not count. A new model counts from 0 again.
            if 0 < self._taken < taken:
                seconds = (now - self._step_since) / (taken - self._taken)
                self._step_seconds = [*self._step_seconds[1 - _NUM_STEPS :], seconds]
            self._taken, self._step_since = taken, now
        if position != self.position:
            self.position, self._since = position, now

    @property
    def idle_seconds(self) -> float:
        return time.monotonic() - self._since

    @property
    def slowest_seconds(self) -> float:
        """The time of the slowest of the last steps."""
        return max(self._step_seconds, default=0.0)

    def limit(self, seconds: float, *, most_seconds: float) -> tuple[float, str]:
        """Return how long ranks may wait for another, and why, if that is not what the user asked for ("")."""
        limits = [(seconds, ""), (_STEP_FACTOR * self.slowest_seconds, "three times the slowest of the last steps")]
        if self._taken < _FIRST_STEPS:
            limits.append((_FIRST_FACTOR * seconds, "four times as long until the second step is done"))
        longest = max(limits, key=lambda limit: limit[0])
        return longest if longest[0] <= most_seconds else (most_seconds, "just below the time-out of the process group")
