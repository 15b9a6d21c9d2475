"""How often a snapshot is taken: every k steps, so that it costs at most 1% of the time.

k = max(⌈cost / (1% · step)⌉, c)                    cost: seconds that a snapshot takes from training
c = ⌈copy / step⌉                                   copy: seconds until it is whole; the next one begins after it

If a rank dies, at most k + c − 1 steps are computed again: c − 1 more than between two snapshots, because a snapshot
that is not whole is passed over, and one more, because the step that it follows is over before it is copied. With k − 1
every k-th step would have to wait for its copy.
"""

import math
from collections import deque
from statistics import median

SHARE = 0.01
_NUM_STEPS = 9
# Until ranks know what the first snapshot has cost.
_FIRST = 3


class Cadence:
    """Measures steps and snapshots of this rank, and derives k."""

    def __init__(self, *, share: float = SHARE) -> None:
        self._share = share
        self._steps: deque[float] = deque(maxlen=_NUM_STEPS)
        self._last: float | None = None
        # Seconds in the current step that snapshots took.
        self._lost = 0.0
        self.cost_seconds = 0.0
        self.copy_seconds = 0.0

    @property
    def step_seconds(self) -> float:
        """The usual time of a step without snapshots; 0 if none has been measured."""
        return median(self._steps) if self._steps else 0.0

    def step_ended(self, now: float) -> None:
        """Note the end of a step. The first one since the start is not measured: it is longer than the others."""
        if self._last is not None:
            self._steps.append(max(1e-6, now - self._last - self._lost))
        self._last, self._lost = now, 0.0

    def stalled(self, seconds: float) -> None:
        """Note that the main thread waited for a snapshot."""
        self._lost += seconds

    def took(self, *, cost_seconds: float, copy_seconds: float) -> None:
        """Note what the last snapshot cost, and how long it took until it was whole."""
        self.cost_seconds, self.copy_seconds = cost_seconds, copy_seconds

    @property
    def steps_to_copy(self) -> int:
        """Steps that end before a snapshot is whole, at least 1: it is copied while the next step computes."""
        step = self.step_seconds
        return max(1, math.ceil(self.copy_seconds / step)) if step else 1

    @property
    def every(self) -> int:
        """k; before anything is measured, so many that it will be by then."""
        if not self._steps:
            return _FIRST
        step = self.step_seconds
        return max(1, math.ceil(self.cost_seconds / (self._share * step)), math.ceil(self.copy_seconds / step))
