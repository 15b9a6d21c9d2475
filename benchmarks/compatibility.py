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

from parity import counts, held, line, lines_said, rows_of, verdicts
from ranks import shut_down
from rows import ROOT, Report, arguments, chosen, run
from scenario_rows.architectures import ARCHITECTURES

OURS = ("ddp", "zero1", "zero2", "shard_grad_op", "fsdp")
ENGINES = (*OURS, "torch DDP", "fully_shard")
_FRAME = """# Compatibility: which architectures train as in one process

{hf} architectures of transformers and {timm} of timm, tiny and with random weights, trained for 3 steps on 2 CPU ranks
and compared with one process that runs both ranks' batches. Five strategies of Shardwise; next to them torch's
`DistributedDataParallel` and `fully_shard`, as a script would call them, the latter on the same units.

Written by `python benchmarks/compatibility.py` with {versions}. *equal*: all parameters are the same bit for bit.
*close*: within 1e-5 of each tensor's largest value, or of a thousandth of the model's largest where that is more.
*refused*: an error of Shardwise says why. *failed*: another error. *wrong*: further apart.

Torch's engines are called with their defaults. Where `DistributedDataParallel` says that parameters were not used,
`find_unused_parameters=True` is its way out; Shardwise needs no such option.

{counts}

## Why

What was refused or failed, with the line that it ended with:

{lines}

## All

{table}
"""


def page(found: dict[str, Any]) -> str:
    rows = found["rows"]
    of_class = {(name, ARCHITECTURES[name].class_name): row for name, row in rows.items() if name in ARCHITECTURES}
    return _FRAME.format(
        **{library: sum(name.startswith(library + ":") for name in rows) for library in ("hf", "timm")},
        versions=", ".join(f"{name} {number}" for name, number in found["versions"].items()),
        counts=counts(rows.values(), engines=ENGINES),
        lines=lines_said(rows, engines=ENGINES),
        table=verdicts(("architecture", "class"), of_class, engines=ENGINES),
    )


REPORT = Report(
    name="compatibility",
    page=ROOT / "docs" / "compatibility.md",
    text=page,
    order=list(ARCHITECTURES),
    packages=("torch", "transformers", "timm"),
)


def main() -> int:
    asked = arguments(__doc__, limit_seconds=120.0).parse_args()
    known = REPORT.read()["rows"] if asked.rest else ()
    rows = rows_of("Architectures", engines=ENGINES, limit_seconds=asked.limit)
    try:
        return run(chosen(rows, only=asked.only, known=known), report=REPORT, held=held, line=line)
    finally:
        shut_down()


if __name__ == "__main__":
    sys.exit(main())
