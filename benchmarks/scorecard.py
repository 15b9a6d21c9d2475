"""The scorecard of benchmarks/chaos.py: how a row is asked to run, what it counts, and how the counts are shown."""

import random
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from rows import ROOT, Outcome, Row, table

_MOST_LINES_SHOWN = 20


class CannotRun(Exception):  # noqa: N818 - says why, and is shown as the row's result
    """A row that has nothing to run on here."""


def _short(text: str) -> str:
    """Return one line of at most 500 characters: how the text begins and how it ends."""
    words = " ".join(text.split())
    return words if len(words) <= 500 else f"{words[:250]} … {words[-250:]}"


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a row has tried, how much of it held, and one line for each that did not.

    `found` are numbers that the row publishes with its counts.
    """

    tried: int = 0
    held: int = 0
    failures: list[str] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def trying(self, what: str, *, count: int = 1) -> Iterator[None]:
        """Count `count` faults, which hold if the block comes to its end."""
        self.tried += count
        try:
            yield
        except CannotRun:
            raise
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            self.failures.append(f"{what[:200]}: {_short(f'{type(error).__name__} at {where}: {error}')}")
            print(f"  did not hold: {self.failures[-1]}", flush=True)
        else:
            self.held += count


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How a row is to run: the full numbers or the short ones, from which chance, in which empty folder, until when."""

    long: bool
    chance: random.Random
    folder: Path
    until: float

    def in_time(self) -> bool:
        """Return whether there is time for one more; only for rows that try as many as fit."""
        return time.monotonic() < self.until

    def pick(self, *, short: int, long: int) -> int:
        return long if self.long else short


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(Row):
    """A row: `run(asked)` injects faults and returns its Tally.

    `seconds`, (short, long): the row tries as many as fit into them, and comes last.
    """

    must_be: str
    seconds: tuple[float, float] | None = None


def run_fault(fault: Fault, *, long: bool, seed: int, folder: Path, most_seconds: float = inf) -> Outcome:
    """Run a row. `most_seconds`: what is left for rows that try as many as fit."""
    begun = time.monotonic()
    most_seconds = min(fault.seconds[long] if fault.seconds is not None else inf, most_seconds)
    chance = random.Random(f"{seed}/{fault.name}")
    why_not = None
    try:
        tally = fault.run(Asked(long=long, chance=chance, folder=folder, until=begun + most_seconds))
    except CannotRun as error:
        tally, why_not = Tally(), str(error)
    except Exception as error:
        # A row that breaks has not shown that anything holds; the others still run.
        traceback.print_exc()
        tally = Tally(failures=[_short(f"the row itself: {type(error).__name__}: {error}")])
    if why_not is None and not tally.tried:
        tally.failures.append("nothing was tried")
    # Folders of this machine tell a reader nothing.
    failures = [line.replace(str(folder), "DIR").replace(f"{ROOT}/", "") for line in tally.failures]
    return {
        "test": fault.shows,
        "must_be": fault.must_be,
        "tried": tally.tried,
        "held": tally.held,
        "failures": failures[:_MOST_LINES_SHOWN],
        "not_run": why_not,
        "found": tally.found,
        "seconds": round(time.monotonic() - begun, 1),
        "long": long,
        "seed": seed,
    }


def held(outcome: Outcome) -> bool:
    """Return whether a row is as it must be. One that could not run here is not a failure of the project."""
    return outcome["not_run"] is not None or (outcome["tried"] == outcome["held"] and not outcome["failures"])


def line(outcome: Outcome) -> str:
    shown = outcome["not_run"] or f"{outcome['held']:,} of {outcome['tried']:,} held"
    return f"{shown}, {outcome['seconds']:.0f} s"


def section(found: dict[str, Any]) -> str:
    """Return the rows in Markdown, and below them what they published and what did not hold."""
    head = ("#", "test", "must be", "tried", "held", "version", "time")
    lines = []
    for number, row in found["rows"].items():
        did = row["not_run"] is None
        counts = (f"{row['tried']:,}", f"{row['held']:,}") if did else ("not run", "–")
        took = f"{row['seconds']:,.0f} s" if did else "–"
        lines.append((number, row["test"], row["must_be"], *counts, "long" if row["long"] else "short", took))
    remarks = [remark for number, row in found["rows"].items() for remark in _remarks(number, row)]
    return "\n".join([table(head, lines), "", *remarks])


def _remarks(number: str, row: Outcome) -> Iterator[str]:
    if row["not_run"] is not None:
        yield f"- Row {number} was not run: {row['not_run']}."
    elif row["found"]:
        yield f"- Row {number}: " + "; ".join(f"{name} {value}" for name, value in row["found"].items()) + "."
    for failure in row["failures"]:
        yield f"- Row {number} did not hold: `{failure.replace('`', chr(39))}`"
