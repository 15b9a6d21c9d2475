"""A claim, the numbers that check it, and the verdict that follows from them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One case in which the claim was checked. `when` ends the sentence "holds when …"; `holds` is computed."""

    when: str
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What guides say, and what was found.

    number       our number, in a few words
    head, rows   the table of numbers
    source       where they come from, with the command that gives them again
    comment      what a reader should know in addition
    """

    said: str
    number: str
    checks: Sequence[Check]
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    source: str
    comment: str = ""

    @property
    def verdict(self) -> str:
        """Return "holds", "does not hold", or in which cases it holds."""
        held = [check.when for check in self.checks if check.holds]
        if len(held) == len(self.checks):
            return "holds"
        return f"holds when {', and when '.join(held)}" if held else "does not hold"

    @property
    def failed(self) -> list[str]:
        return [check.when for check in self.checks if not check.holds]


def near(value: float, said: float, *, share: float) -> bool:
    """Return whether a number is within a share of what was said."""
    return abs(value / said - 1) <= share


def gb(num_bytes: float) -> str:
    """Return GB as guides count them: 10⁹ bytes."""
    return f"{num_bytes / 1e9:.2f}" if num_bytes < 1e11 else f"{num_bytes / 1e9:.0f}"
