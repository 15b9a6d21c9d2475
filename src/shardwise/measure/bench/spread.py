"""Values measured several times, and whether two such spreads can be ranked. No torch here."""

import statistics
from dataclasses import dataclass
from enum import Enum

# Two runs of the same case may differ by this factor.
_SAME_PROCESSES = 1.03
# Smaller differences are not worth mentioning.
_ABOUT = 1.10


class SpeedRelation(Enum):
    """A comparison of the times of two cases.

    APART   their interquartile ranges do not overlap, and their medians differ by 3% or more: they can be ranked
    ALIKE   both ranges lie within 10% of each other: about as fast, whichever is faster
    NOISY   the ranges overlap, and are wider than that: too noisy to rank
    """

    APART = "apart"
    ALIKE = "alike"
    NOISY = "noisy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Values of one quantity, measured several times."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    @property
    def middle(self) -> tuple[float, float]:
        """The interquartile range: an outlier does not widen it."""
        if len(self.values) == 1:
            return self.values[0], self.values[0]
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high

    @property
    def off(self) -> float | None:
        """The largest distance of a quartile from the median, relative to it; None for a single value."""
        if len(self.values) == 1:
            return None
        low, high = self.middle
        return max(high - self.median, self.median - low) / self.median

    def overlaps(self, other: "Spread") -> bool:
        return self.middle[0] <= other.middle[1] and other.middle[0] <= self.middle[1]


def relation(one: Spread, other: Spread) -> SpeedRelation:
    """Return whether the two can be ranked, and if not, why."""
    ratio = max(one.median, other.median) / min(one.median, other.median)
    if ratio >= _SAME_PROCESSES and not one.overlaps(other):
        return SpeedRelation.APART
    lows, highs = zip(one.middle, other.middle, strict=True)
    return SpeedRelation.ALIKE if max(highs) <= _ABOUT * min(lows) else SpeedRelation.NOISY
