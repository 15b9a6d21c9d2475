"""Shardwise inside other frameworks' loops, against their own DDP, on 2 CPU ranks: `python benchmarks/integrations.py`.

Every scenario of benchmarks/integration_rows is trained by the framework as it is, and then with Shardwise under `ddp`,
`zero2` and `fsdp`. Losses, metrics and final weights are compared on both ranks: bit for bit, or within 1e-6 where
gradients are clipped (frameworks sum a norm in fp32, Shardwise in float64). Writes
benchmarks/results/integrations.json and the table in docs/measured-integrations.md. The exit code is 1 if a row did not
hold. A framework that is not installed is left out, and keeps the rows that it has.
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rows import ROOT, Outcome, Report, Row, arguments, chosen, run, table
from workers import output_of, torchrun

STRATEGIES = ("ddp", "zero2", "fsdp")
# Group → its script, the ranks on which torchrun starts it in turn (0: the framework starts them), and its packages.
GROUPS: dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]] = {
    "hf": ("hf_rows.py", (2, 1), ("transformers", "accelerate")),
    "trl": ("trl_rows.py", (2,), ("trl", "peft", "transformers", "accelerate")),
    "lightning": ("lightning_rows.py", (2,), ("lightning",)),
    "ray": ("ray_rows.py", (0,), ("ray",)),
}


def run_group(name: str, *, strategies: Sequence[str], limit_seconds: float) -> Outcome:
    """Run the script of a group. It finds in the folder what it has left there on another number of ranks."""
    script, ranks, packages = GROUPS[name]
    path = str(Path(__file__).parent / "integration_rows" / script)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in ranks:
            output_of(*torchrun(num_ranks), path, folder, *strategies, limit_seconds=limit_seconds)
            found |= json.loads(Path(folder, "found.json").read_text())
    return {"versions": {package: version(package) for package in ("torch", *packages)}, "rows": found}


def held(outcome: Outcome) -> bool:
    return all(far <= row["bound"] for row in outcome["rows"].values() for far in row["distance"].values())


def line(outcome: Outcome) -> str:
    return "; ".join(f"{name} (bound {row['bound']:g}): {row['distance']}" for name, row in outcome["rows"].items())


def section(found: dict[str, Any]) -> str:
    groups = [found["rows"][name] for name in GROUPS if name in found["rows"]]
    rows = {name: row["distance"] for group in groups for name, row in group["rows"].items()}
    versions = {name: number for group in groups for name, number in group["versions"].items()}
    cells = [[name, *(_cell(distances.get(one)) for one in STRATEGIES)] for name, distances in rows.items()]
    shown = table(["scenario", *(f"`{name}`" for name in STRATEGIES)], cells)
    return f"{shown}\n\nRun with {', '.join(f'{name} {number}' for name, number in versions.items())}."


def _cell(distance: float | None) -> str:
    if distance is None:
        return "–"
    return "equal" if distance == 0 else f"within {distance:.1g}"


REPORT = Report(
    name="integrations",
    page=ROOT / "docs" / "measured-integrations.md",
    section="integrations",
    text=section,
    order=list(GROUPS),
)


def main() -> int:
    parser = arguments(__doc__, limit_seconds=300.0)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES, help="with --json only")
    parser.add_argument("--json", action="store_true", help="print the outcomes, and write nothing")
    asked = parser.parse_args()
    if not asked.json and set(asked.strategies) != set(STRATEGIES):
        parser.error("the table holds all strategies: --strategies goes with --json")
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    rows = [
        Row(
            name=name,
            run=partial(run_group, name, strategies=asked.strategies, limit_seconds=asked.limit),
            needs=packages,
        )
        for name, (_, _, packages) in GROUPS.items()
    ]
    rows = chosen(rows, only=asked.only, known=REPORT.read()["rows"] if asked.rest else ())
    if asked.json:
        found = {row.name: row.run() for row in rows}
        print(json.dumps(found))
        return 0 if all(map(held, found.values())) else 1
    return run(rows, report=REPORT, held=held, line=line)


if __name__ == "__main__":
    sys.exit(main())
