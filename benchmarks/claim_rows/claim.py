"""A claim, the numbers that check it, and the verdict that follows from them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Numbers, ready to be shown."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def lines(self) -> list[str]:
        rule = "|---" + "|---:" * (len(self.head) - 1) + "|"
        return [f"| {' | '.join(self.head)} |", rule, *(f"| {' | '.join(row)} |" for row in self.rows)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One case in which the claim was looked at. `when` ends the sentence "holds when …"; `holds` is computed."""

    when: str
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What guides say, and what came of it.

    number    our number, in a few words
    source    where it comes from, with the command that gives it again
    comment   what a reader should know beside it
    """

    said: str
    number: str
    checks: Sequence[Check]
    table: Table
    source: str
    comment: str = ""

    @property
    def verdict(self) -> str:
        """Holds, if it does in all cases; does not hold, if it does in none; else in which it does."""
        held = [check.when for check in self.checks if check.holds]
        if len(held) == len(self.checks):
            return "holds"
        return f"holds when {', and when '.join(held)}" if held else "does not hold"

    @property
    def failed(self) -> list[str]:
        return [check.when for check in self.checks if not check.holds]


def near(value: float, said: float, *, share: float) -> bool:
    """Whether a number is what was said, to a share of it."""
    return abs(value / said - 1) <= share


def gb(num_bytes: float) -> str:
    """As guides count: 10⁹ bytes."""
    return f"{num_bytes / 1e9:.2f}" if num_bytes < 1e11 else f"{num_bytes / 1e9:.0f}"
