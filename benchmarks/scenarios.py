"""Ways to train, each the same script on two ranks under every engine, compared with one process.

python benchmarks/scenarios.py                     all rows; a few minutes on 2 quiet cores
python benchmarks/scenarios.py --only LoRA,Muon    rows whose names contain one of these; the others keep their results
python benchmarks/scenarios.py --rest              rows that have no result yet

Results go to benchmarks/results/scenarios.json and docs/scenarios.md. The exit code is 1 if a training of ours is wrong
or failed.
"""

import sys
from typing import Any

from parity import GROUPS, counts, held, line, lines_said, rows_of, verdicts
from ranks import shut_down
from rows import ROOT, Report, arguments, chosen, run

OURS = ("ddp", "zero1", "zero2", "fsdp")
ENGINES = (*OURS, "torch DDP", "fully_shard")
SHOWN = ("Optimizers", "Trainings")


def section(found: dict[str, Any]) -> str:
    rows = found["rows"]
    tables = [
        verdicts([group], {(name,): rows[name] for name in GROUPS[group] if name in rows}, engines=ENGINES)
        for group in SHOWN
    ]
    parts = (counts(rows.values(), engines=ENGINES), *tables, "What the refusals say:", lines_said(rows, engines=OURS))
    return "\n\n".join(parts)


REPORT = Report(
    name="scenarios",
    page=ROOT / "docs" / "scenarios.md",
    section="scenarios",
    text=section,
    order=[name for group in SHOWN for name in GROUPS[group]],
)


def main() -> int:
    asked = arguments(__doc__, limit_seconds=120.0).parse_args()
    rows = [row for group in SHOWN for row in rows_of(group, engines=ENGINES, limit_seconds=asked.limit)]
    known = REPORT.read()["rows"] if asked.rest else ()
    try:
        return run(chosen(rows, only=asked.only, known=known), report=REPORT, held=held, line=line)
    finally:
        shut_down()


if __name__ == "__main__":
    sys.exit(main())
