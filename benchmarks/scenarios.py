"""Ways to train, each the same script on two ranks under every engine, compared with one process.

python benchmarks/scenarios.py                     all rows; a few minutes on 2 quiet cores
python benchmarks/scenarios.py --only LoRA,Muon    rows whose names contain one of these; the others keep their results
python benchmarks/scenarios.py --rest              rows that have no result yet
python benchmarks/scenarios.py --graphs            our strategies again, with units as CUDA graphs, simulated on the CPU

Results go to benchmarks/results/scenarios.json and docs/scenarios.md. The exit code is 1 if a training of ours is wrong
or failed.
"""

import sys
from typing import Any

from parity import GROUPS, as_graphs, cell, counts, lines_said, main, verdicts
from rows import ROOT, Report

OURS = ("ddp", "zero1", "zero2", "fsdp")
ENGINES = (*OURS, "torch DDP", "fully_shard")
GRAPHS = tuple(map(as_graphs, OURS))
SHOWN = ("Optimizers", "Trainings", "Unusual trainings")


def section(found: dict[str, Any]) -> str:
    rows = found["rows"]
    ran = {group: {(name,): rows[name] for name in GROUPS[group] if name in rows} for group in SHOWN}
    tables = [verdicts([group], of_group, engines=ENGINES) for group, of_group in ran.items() if of_group]
    parts = (
        counts(rows.values(), engines=ENGINES),
        with_graphs(rows),
        *tables,
        "What the refusals say:",
        lines_said(rows, engines=OURS),
    )
    return "\n\n".join(part for part in parts if part)


def with_graphs(rows: dict[str, Any]) -> str:
    """A table of the verdicts with units as graphs, and the rows where one of them is another than without."""
    ran = {name: row for name, row in rows.items() if {OURS[0], GRAPHS[0]} <= row.keys()}
    if not ran:
        return ""
    replayed = sum(any(row[engine].get("replayed") for engine in GRAPHS) for row in ran.values())
    differ = [
        f"- {name}: `{engine}` {cell(row[engine])}, with graphs {cell(row[as_graphs(engine)])}"
        for name, row in ran.items()
        for engine in OURS
        if row[engine]["verdict"] != row[as_graphs(engine)]["verdict"]
    ]
    said = f"With units as CUDA graphs (`--graphs`), of which {replayed} of {len(ran)} scripts replayed some:"
    others = "Other verdicts than without graphs:\n\n" + "\n".join(differ) if differ else "No verdict is another one."
    return "\n\n".join([said, counts(ran.values(), engines=GRAPHS), others])


REPORT = Report(
    name="scenarios",
    page=ROOT / "docs" / "scenarios.md",
    section="scenarios",
    text=section,
    order=[name for group in SHOWN for name in GROUPS[group]],
)


if __name__ == "__main__":
    sys.exit(main(__doc__, report=REPORT, groups=SHOWN, engines=ENGINES, graphs=GRAPHS))
