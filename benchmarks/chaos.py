"""Breaks jobs on purpose in twenty-one ways and prints the scorecard: what was tried, and how often it came out right.

python benchmarks/chaos.py                          every row, short: at most 15 minutes on 2 quiet cores
python benchmarks/chaos.py --long                   the full numbers: at most 60 minutes
python benchmarks/chaos.py --only 3,4 --seed 7      some rows; the results of the others are kept

Results go to benchmarks/results/chaos.json and docs/reliability.md. The exit code is 1 if a row did not hold.
Rows are in benchmarks/chaos_rows/faults.toml; most of what they run is in tests/, where the suite tries a few of
the same.
"""

import importlib
import os
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

from rows import ROOT, Outcome, Report, arguments, chosen, run

TESTS = ROOT / "tests"
TABLE = ROOT / "benchmarks" / "chaos_rows" / "faults.toml"
# What all rows of the short and of the long version may take, and what a row gets that comes too late.
_BUDGET_SECONDS = (14.5 * 60, 58.0 * 60)
_LEAST_SECONDS = 30.0


def fault_of(name: str, row: dict[str, Any]) -> "Fault":
    """Return a row of the table, with its function."""
    if "tests" in row:
        run_row = importlib.import_module("chaos_rows.suite").faults_of(*row["tests"], only=row.get("only", ""))
    else:
        module, _, function = row["run"].partition(".")
        run_row = getattr(importlib.import_module(f"chaos_rows.{module}"), function)
    seconds = tuple(row["seconds"]) if "seconds" in row else None
    return Fault(name=name, shows=row["shows"], must_be=row["must_be"], run=run_row, seconds=seconds)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--long", action="store_true", help="the full numbers: up to 60 minutes")
    parser.add_argument("--seed", type=int, default=0, help="seed from which faults are drawn (default: 0)")
    asked = parser.parse_args()
    faults = [fault_of(name, row) for name, row in tomllib.loads(TABLE.read_text()).items()]
    report = Report(
        name="chaos",
        page=ROOT / "docs" / "reliability.md",
        section="chaos",
        text=section,
        order=[fault.name for fault in faults],
    )
    faults = chosen(faults, only=asked.only, known=report.read()["rows"] if asked.rest else ())
    if not faults:
        parser.error("--only: no such row")
    # The rows that try as many as fit come last, and share what the others have left.
    faults.sort(key=lambda fault: (fault.seconds is not None, (-1 if fault.seconds else 1) * int(fault.name)))
    deadline = time.monotonic() + _BUDGET_SECONDS[asked.long]
    print(f"seed {asked.seed}, {'long' if asked.long else 'short'}", flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:

        def each(fault: "Fault") -> Outcome:
            folder = Path(name, fault.name)
            folder.mkdir()
            left = max(_LEAST_SECONDS, deadline - time.monotonic())
            try:
                return run_fault(fault, long=asked.long, seed=asked.seed, folder=folder, most_seconds=left)
            finally:
                # Ranks that a row has used hold memory and time that the next one's should not be charged for.
                shut_down()

        return run(faults, report=report, held=held, line=line, each=each)


if __name__ == "__main__":
    # Here and not above: the processes that ranks run in import this file too, and need none of it.
    sys.path[:0] = [str(TESTS / "dist"), str(TESTS / "unit"), str(TESTS)]
    # Jobs that rows start find these modules as well; and two cores have no use for more threads.
    paths = [str(TESTS / "dist"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from ranks import shut_down
    from scorecard import Fault, held, line, run_fault, section

    sys.exit(main())
