"""Ways to train, each the same script on two ranks under every engine, compared with one process.

python benchmarks/scenarios.py                     all rows; a few minutes on 2 quiet cores
python benchmarks/scenarios.py --only LoRA,Muon    rows whose names contain one of these; the others keep their results
python benchmarks/scenarios.py --rest              rows that have no result yet

Results go to benchmarks/results/scenarios.json and docs/scenarios.md. The exit code is 1 if a training of ours is wrong
or failed.
"""

import sys
from typing import Any

from parity import GROUPS, counts, lines_said, main, verdicts
from rows import ROOT, Report

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


if __name__ == "__main__":
    sys.exit(main(__doc__, report=REPORT, groups=SHOWN, engines=ENGINES))
