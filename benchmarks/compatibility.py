"""Which architectures train as in one process, on 2 CPU ranks: `python benchmarks/compatibility.py`.

Tiny models with random weights of the architectures of transformers and timm (scenario_rows/architectures.py), 3 steps
of SGD with momentum under each of our five strategies, torch's DistributedDataParallel, and `fully_shard` at the same
units. Parameters at the end are compared with one process that runs both ranks' batches (parity.py says how).

Writes benchmarks/results/compatibility.json and docs/compatibility.md after each row. A run that was stopped goes on
where it was with `--rest`. The exit code is 1 if one of ours is wrong or failed. A library that is not installed is
left out, and keeps its rows.
"""

import sys
from typing import Any

from parity import counts, lines_said, main, verdicts
from rows import ROOT, Report
from scenario_rows.architectures import ARCHITECTURES

OURS = ("ddp", "zero1", "zero2", "shard_grad_op", "fsdp")
ENGINES = (*OURS, "torch DDP", "fully_shard")


def section(found: dict[str, Any]) -> str:
    rows = found["rows"]
    hf, timm = (sum(name.startswith(f"{library}:") for name in rows) for library in ("hf", "timm"))
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    of_class = {(name, ARCHITECTURES[name].class_name): row for name, row in rows.items() if name in ARCHITECTURES}
    parts = (
        f"{hf} architectures of transformers and {timm} of timm, with {versions}:",
        counts(rows.values(), engines=ENGINES),
        "## Why",
        "What was refused or failed, with the line that it ended with:",
        lines_said(rows, engines=ENGINES),
        "## All",
        verdicts(("architecture", "class"), of_class, engines=ENGINES),
    )
    return "\n\n".join(parts)


REPORT = Report(
    name="compatibility",
    page=ROOT / "docs" / "compatibility.md",
    section="compatibility",
    text=section,
    order=list(ARCHITECTURES),
    packages=("torch", "transformers", "timm"),
)


if __name__ == "__main__":
    sys.exit(main(__doc__, report=REPORT, groups=("Architectures",), engines=ENGINES))
