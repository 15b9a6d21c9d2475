"""The scorecard of benchmarks/chaos.py: rows, what they count, and where the counts are written."""

import json
import platform
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "chaos.json"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- section chaos -->", "<!-- end of chaos -->"
_MOST_LINES_SHOWN = 20
_INTRODUCTION = """## The chaos scorecard

Each row injects faults into real jobs on the CPU of one machine and counts how many of them end as they must.
`make chaos` runs the short version of every row, `make chaos-long` the full numbers. *Version* says which of the two
the figures of a row come from: the last one that was run. *Tried* is the number of faults that were injected in that
run, *held* is the number that ended as they must, and *time* is how long the row took. A row that did not run says why.
To run some rows with other faults: `python benchmarks/chaos.py --only 3,4 --seed 7`. The same seed draws the same
faults; when exactly they hit still depends on timing.
"""


class CannotRun(Exception):  # noqa: N818 - says why, and is shown as the row's result
    """A row that has nothing to run on here."""


def _short(text: str) -> str:
    """One line of at most 500 characters: how it begins and how it ends."""
    words = " ".join(text.split())
    return words if len(words) <= 500 else f"{words[:250]} … {words[-250:]}"


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a row has tried, what of it held, and one line for each that did not.

    `found` are numbers that the row publishes with its counts.
    """

    tried: int = 0
    held: int = 0
    failures: list[str] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def trying(self, what: str, *, count: int = 1) -> Iterator[None]:
        """`count` faults that hold if the block comes to its end."""
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
        """Whether there is time for one more; only for rows that try as many as fit."""
        return time.monotonic() < self.until

    def pick(self, *, short: int, long: int) -> int:
        return long if self.long else short


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the scorecard. `seconds`, (short, long): the row tries as many as fit into them, and comes last."""

    number: int
    test: str
    must_be: str
    run: Callable[[Asked], Tally]
    seconds: tuple[float, float] | None = None


def run_row(row: Row, *, long: bool, seed: int, folder: Path, most_seconds: float = inf) -> dict[str, Any]:
    """What chaos.json keeps of the row. `most_seconds`: what is left for rows that try as many as fit."""
    asked = Asked(
        long=long,
        chance=random.Random(f"{seed}/{row.number}"),
        folder=folder,
        until=time.monotonic() + min(row.seconds[long] if row.seconds is not None else inf, most_seconds),
    )
    begun = time.monotonic()
    why_not = None
    try:
        tally = row.run(asked)
    except CannotRun as error:
        tally, why_not = Tally(), str(error)
    except Exception as error:
        # A row that breaks has not shown that anything holds; the others still run.
        traceback.print_exc()
        tally = Tally(failures=[_short(f"the row itself: {type(error).__name__}: {error}")])
    if why_not is None and not tally.tried:
        tally.failures.append("nothing was tried")
    return {
        "number": row.number,
        "test": row.test,
        "must_be": row.must_be,
        "tried": tally.tried,
        "held": tally.held,
        # Folders of this machine tell a reader nothing.
        "failures": [
            line.replace(str(folder), "DIR").replace(f"{ROOT}/", "") for line in tally.failures[:_MOST_LINES_SHOWN]
        ],
        "not_run": why_not,
        "found": tally.found,
        "seconds": round(time.monotonic() - begun, 1),
        "long": long,
        "seed": seed,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def held(result: Mapping[str, Any]) -> bool:
    """Whether a row is as it must be. One that could not run here is not a failure of the project."""
    return result["not_run"] is not None or (result["tried"] == result["held"] and not result["failures"])


def read_results() -> dict[int, dict[str, Any]]:
    """Number of a row → its last result."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return {result["number"]: result for result in kept}


def write_results(results: Mapping[int, Mapping[str, Any]]) -> None:
    """Into chaos.json, and as a table into docs/reliability.md; all that is not between our marks there stays."""
    ordered = [results[number] for number in sorted(results)]
    RESULTS.write_text(json.dumps(ordered, indent=2, ensure_ascii=False) + "\n")
    section = f"{BEGIN}\n\n{_INTRODUCTION}\n{table(ordered)}\n{END}"
    text = PAGE.read_text() if PAGE.exists() else f"# Reliability\n\n{BEGIN}\n{END}\n"
    if BEGIN not in text:
        text = f"{text.rstrip()}\n\n{BEGIN}\n{END}\n"
    before, rest = text.split(BEGIN, 1)
    PAGE.write_text(before + section + rest.split(END, 1)[1])


def table(results: list[Mapping[str, Any]]) -> str:
    """The rows in Markdown, and below them what they published and what did not hold."""
    lines = ["| # | test | must be | tried | held | version | time |", "|---|---|---|---|---|---|---|"]
    for result in results:
        counts = f"{result['tried']:,} | {result['held']:,}" if result["not_run"] is None else "not run | –"
        form = "long" if result["long"] else "short"
        took = f"{result['seconds']:,.0f} s" if result["not_run"] is None else "–"
        about = f"{result['number']} | {result['test']} | {result['must_be']}"
        lines.append(f"| {about} | {counts} | {form} | {took} |")
    lines += ["", *_remarks(results)]
    return "\n".join(lines).rstrip() + "\n"


def _remarks(results: list[Mapping[str, Any]]) -> Iterator[str]:
    for result in results:
        row = f"- Row {result['number']}"
        if result["not_run"] is not None:
            yield f"{row} was not run: {result['not_run']}."
        elif result["found"]:
            yield f"{row}: " + "; ".join(f"{name} {value}" for name, value in result["found"].items()) + "."
        for line in result["failures"]:
            yield f"{row} did not hold: {_as_text(line)}"


def _as_text(line: str) -> str:
    """One line that Markdown shows as it is."""
    return "`" + line.replace("`", "'") + "`"
