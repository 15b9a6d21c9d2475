"""Breaks jobs on purpose in twenty ways and prints the scorecard: what was tried, and how often it came out right.

python benchmarks/chaos.py                          every row, short: at most 15 minutes on 2 quiet cores
python benchmarks/chaos.py --long                   the full numbers: at most 60 minutes
python benchmarks/chaos.py --only 3,4 --seed 7      some rows; the results of the others are kept

Results go to benchmarks/results/chaos.json and docs/reliability.md. The exit code is 1 if a row did not hold.
Rows are in benchmarks/chaos_rows/; most of what they run is in tests/, where the suite tries a few of the same.
"""

import argparse
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
GROUPS = (
    *("modules", "interruptions", "saves", "resumes", "watched", "failing_ranks", "overflows"),
    *("malformed", "hostile", "launches", "silent", "endurance"),
)
# What all rows of the short and of the long version may take, and what a row gets that comes too late.
_BUDGET_SECONDS = (14.5 * 60, 58.0 * 60)
_LEAST_SECONDS = 30.0


def find_rows() -> list["Row"]:
    found = [row for group in GROUPS for row in importlib.import_module(f"chaos_rows.{group}").ROWS]
    return sorted(found, key=lambda row: row.number)


def run_rows(rows: Iterable["Row"], *, long: bool, seed: int) -> bool:
    """Whether all of them held. Results are written after each, so that an interrupt loses one."""
    ok = True
    # The rows that try as many as fit come last, and share what the others have left.
    ordered = sorted(rows, key=lambda row: (row.seconds is not None, -row.number if row.seconds else row.number))
    deadline = time.monotonic() + _BUDGET_SECONDS[long]
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        for row in ordered:
            print(f"{row.number:2} {row.test} …", flush=True)
            folder = Path(name, str(row.number))
            folder.mkdir()
            cpu_before = cpu_seconds()
            try:
                left = max(_LEAST_SECONDS, deadline - time.monotonic())
                result = run_row(row, long=long, seed=seed, folder=folder, most_seconds=left)
            finally:
                # Ranks that a row has used hold memory and time that the next one's should not be charged for.
                shut_down()
            result["cpu_seconds"] = round(cpu_seconds() - cpu_before, 1)
            write_results(read_results() | {row.number: result})
            ok = ok and held(result)
            shown = result["not_run"] or f"{result['held']:,} of {result['tried']:,} held"
            took = f"{result['seconds']:.0f} s, CPU {result['cpu_seconds']:.0f} s"
            print(f"   {'ok   ' if held(result) else 'WRONG'} {shown}, {took}", flush=True)
    return ok


def numbers(text: str) -> set[int]:
    return {int(word) for word in text.split(",")}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--long", action="store_true", help="the full numbers: up to 60 minutes")
    parser.add_argument("--only", type=numbers, metavar="3,4", help="the numbers of the rows to run (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="what faults are drawn from (default: 0)")
    args = parser.parse_args()
    rows = [row for row in find_rows() if args.only is None or row.number in args.only]
    if not rows:
        parser.error("--only: no such row")
    print(f"seed {args.seed}, {'long' if args.long else 'short'}", flush=True)
    begun = time.monotonic()
    ok = run_rows(rows, long=args.long, seed=args.seed)
    print(f"{(time.monotonic() - begun) / 60:.1f} minutes")
    print("every row held" if ok else "NOT every row held: see docs/reliability.md")
    return 0 if ok else 1


if __name__ == "__main__":
    # Here and not above: the processes that ranks run in import this file too, and need none of it.
    sys.path[:0] = [str(TESTS / "dist"), str(TESTS / "unit"), str(TESTS)]
    # Jobs that rows start find these modules as well; and two cores have no use for more threads.
    paths = [str(TESTS / "dist"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from cpu_time import cpu_seconds
    from ranks import shut_down
    from scorecard import Row, held, read_results, run_row, write_results

    sys.exit(main())
