"""Every number of docs/planner.md and docs/measured-planner.md, predicted again: one command.

    python benchmarks/planner_docs.py --published DIR [--only SECTION …]

DIR holds the tables that others published; what was measured by us is in benchmarks/results. Between the two lines

    <!-- section NAME -->
    <!-- end of NAME -->

of a page stands what this command writes; all else is left as it is.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import axes
import estimators
import fit_overhead
import planner_speed
import published_memory
import scaling_curves
from memory_predictions import TOTALS, compare
from published import MEASURED, measured, read
from published_rows import LeftOut
from rows import ROOT, fill, table
from validate_time import (
    Checked,
    check,
    correlations,
    errors_by_table,
    inside,
    misfits,
    on_our_engine,
    strategies,
    summary,
    timed,
)

PAGES = (ROOT / "docs" / "planner.md", ROOT / "docs" / "measured-planner.md")
MEMORY = ROOT / "benchmarks" / "results" / "validate_memory_h200.json"
EXAMPLE = ("llama-3.1-8b", "--cluster", "8xh100-80gb")

Found = tuple[list[Checked], list[LeftOut]]


@cache
def predictions(folder: Path) -> Found:
    published, left_out = read(folder)
    return check([*measured(MEASURED), *published]), left_out


# Sections


def example(_: Path) -> str:
    command = [sys.executable, "-m", "shardwise", "plan", *EXAMPLE]
    environment = os.environ | {"COLUMNS": "80", "NO_COLOR": "1"}
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    lines = [line.rstrip() for line in out.splitlines()]
    return "\n".join(["```", f"$ shardwise plan {' '.join(EXAMPLE)}", *lines, "```"])


def memory(_: Path) -> str:
    rows = compare(json.loads(MEMORY.read_text())["rows"])

    def cell(total: str, engine: str) -> str:
        errors = [abs(row["errors"][total]) for row in rows if row["engine"] == engine and total in row["errors"]]
        return f"{statistics.median(errors):.2%}, {max(errors):.1%}"

    lines = [[total, *(cell(total, engine) for engine in ("shardwise", "torch"))] for total in TOTALS]
    return table(("error of", "ours: median, worst", "torch's: median, worst"), lines)


def time(folder: Path) -> str:
    found, _ = predictions(folder)
    ranks = "; ".join(f"{name}: {value:.3f}" for name, value in correlations(found).items())
    return "\n".join(
        [
            *errors_by_table(found),
            "",
            *summary(found),
            "",
            f"Rank correlation, of tables with ten rows or more: {ranks}. Pairs of strategies that differ by more than "
            f"5% on the same training: {strategies(found)} in the right order.",
        ]
    )


def peaks(folder: Path) -> str:
    found, _ = predictions(folder)
    wrong = list(misfits(found))
    ran, not_ran = (sum(one.row.ran == did for one in found) for did in (True, False))
    told = "; ".join(wrong) if wrong else "none is said to be otherwise"
    count, also_wrong = on_our_engine(found)
    ours = "; ".join(also_wrong) if also_wrong else "all are said to fit"
    return "\n".join(
        [
            published_memory.report([one for one in found if one.row.peak_bytes is not None]),
            "",
            f"{ran} rows ran and {not_ran} ran out of memory: {told}. The {count} trainings under FSDP, planned with "
            f"our engine instead: {ours}.",
        ]
    )


def curves(_: Path) -> str:
    return "\n".join(scaling_curves.table())


def left_out(folder: Path) -> str:
    _, rows = predictions(folder)
    counts = Counter((row.table, row.reason) for row in rows)
    return table(("table", "rows", "why not"), [(name, str(n), reason) for (name, reason), n in counts.items()])


def goals(folder: Path) -> str:
    """What was aimed at, and what came of it."""
    found, _ = predictions(folder)
    return table(("goal", "reached", "met"), _goals(found))


def _goals(found: Sequence[Checked]) -> Iterator[tuple[str, str, str]]:
    rows = timed(found)
    held = [one for one in rows if one.row.is_held_out]
    median = statistics.median(abs(one.error) for one in rows)
    yield _goal("median error of all rows at most 8%", f"{median:.1%}", median <= 0.08)
    share = sum(one.is_inside for one in held) / len(held)
    yield _goal("85% of the held-out rows inside their band", inside(held), share >= 0.85)
    band = statistics.median(one.band for one in held)
    yield _goal("median band of the held-out rows at most 12%", f"{band:.1%}", band <= 0.12)
    ranks = correlations(found)
    least = min(ranks, key=lambda name: ranks[name])
    yield _goal(
        "rank correlation at least 0.97 in each table of ten rows or more",
        f"{sum(value >= 0.97 for value in ranks.values())} of {len(ranks)}; least {ranks[least]:.3f} ({least})",
        ranks[least] >= 0.97,
    )
    worst = max(abs(error) for curve in scaling_curves.CURVES for error in curve.errors())
    yield _goal("scaling curves within 5 points at every point", f"{100 * worst:.1f}", worst <= 0.05)
    wrong = len(list(misfits(found)))
    yield _goal("nothing that ran is said not to fit, and the other way round", f"{wrong} are", wrong == 0)


def _goal(what: str, reached: str, is_met: bool) -> tuple[str, str, str]:
    return what, reached, "yes" if is_met else "**no**"


def probed(_: Path) -> str:
    return "\n".join(fit_overhead.report(fit_overhead.check_shipped()))


def compared(folder: Path) -> str:
    measured = estimators.errors(estimators.measured_rows(), estimators.SUMMARISED)
    published = estimators.published_errors(folder)
    lines = [
        *("Measured on one H200, both engines:", "", *estimators.summary(list(measured))),
        *("", "Published peaks (LoRA and QLoRA, torch's engines):", "", *estimators.summary(list(published)), ""),
    ]
    return "\n".join([*lines, *estimators.table(estimators.chosen_rows())])


def speed(_: Path) -> str:
    return "\n".join(["```", *planner_speed.lines(), "```"])


SECTIONS: dict[str, Callable[[Path], str]] = {
    "example": example,
    "memory": memory,
    "time": time,
    "peaks": peaks,
    "curves": curves,
    "left-out": left_out,
    "goals": goals,
    "probed": probed,
    "compared": compared,
    "speed": speed,
    "axes": lambda _: axes.section(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path, required=True, help="the folder of published tables")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="leave the others")
    arguments = parser.parse_args()
    for name in arguments.only:
        text = SECTIONS[name](arguments.published)
        (page,) = [page for page in PAGES if f"<!-- section {name} -->" in page.read_text()]
        page.write_text(fill(page.read_text(), {name: text}))
        print(f"{name}: {len(text.splitlines())} lines", flush=True)


if __name__ == "__main__":
    main()
