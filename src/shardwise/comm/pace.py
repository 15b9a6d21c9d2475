"""How fast this rank moves, and what the watchdog should have patience for."""

import time

from shardwise.comm.rank_progress import PROGRESS

# Before so many steps were taken, compilers may hold up a rank: the limit is so many times as long.
_FIRST_STEPS = 2
_FIRST_FACTOR = 4.0
# Never less than so many times the slowest of the last steps.
_NUM_STEPS = 8
_STEP_FACTOR = 3.0


class Pace:
    """Looked at from time to time (`note`): since when nothing was issued, and how long the last steps took."""

    def __init__(self) -> None:
        self.position = (0, 0, 0)
        self._since = self._step_since = time.monotonic()
        self._step_seconds: list[float] = []
        self._taken = 0

    def note(self) -> None:
        position, taken = (PROGRESS.step, PROGRESS.count, PROGRESS.evaluated), PROGRESS.taken
        now = time.monotonic()
        if taken != self._taken:
            # The first step is compiled and learned in, and is no measure. A new model counts from 0.
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
        """Of the last steps."""
        return max(self._step_seconds, default=0.0)

    def limit(self, seconds: float, *, most_seconds: float) -> float:
        """How long others may wait for a rank, where `seconds` is what was asked for."""
        first = _FIRST_FACTOR if self._taken < _FIRST_STEPS else 1.0
        return min(max(first * seconds, _STEP_FACTOR * self.slowest_seconds), most_seconds)
