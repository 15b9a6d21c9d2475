"""Shardwise inside other frameworks' loops, against their own DDP, on 2 CPU ranks: `python benchmarks/integrations.py`.

Every scenario of benchmarks/integration_rows is trained by the framework as it is, and then with Shardwise under `ddp`,
`zero2` and `fsdp`. Losses, metrics and final weights are compared on both ranks: bit for bit, or within 1e-6 where
gradients are clipped (frameworks sum a norm in fp32, Shardwise in float64). Writes
benchmarks/results/integrations.json and the table in docs/integrations.md. The exit code is 1 if a row did not hold. A
framework that is not installed is left out, and keeps the rows that it has.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "integrations.json"
PAGE = HERE.parent / "docs" / "integrations.md"
BEGIN, END = "<!-- rows: python benchmarks/integrations.py -->", "<!-- end of rows -->"
STRATEGIES = ("ddp", "zero2", "fsdp")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that run in the same processes. `steps` are scripts with the number of ranks that torchrun starts; 0 where
    the framework starts them itself.
    """

    steps: tuple[tuple[str, int], ...]
    packages: tuple[str, ...]

    def missing(self) -> list[str]:
        return [package for package in self.packages if importlib.util.find_spec(package) is None]


GROUPS = {
    "hf": Group(steps=(("hf_rows.py", 2), ("hf_one_rank.py", 1)), packages=("transformers", "accelerate")),
    "trl": Group(steps=(("trl_rows.py", 2),), packages=("trl", "peft", "transformers", "accelerate")),
    "lightning": Group(steps=(("lightning_rows.py", 2),), packages=("lightning",)),
    "ray": Group(steps=(("ray_rows.py", 0),), packages=("ray",)),
}


def run(group: Group, *, folder: Path, strategies: Sequence[str], limit_seconds: float) -> dict[str, Any]:
    """Row → its bound and distances; all scripts of a group find what the ones before have left in `folder`."""
    found: dict[str, Any] = {}
    for script, num_ranks in group.steps:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        process = subprocess.Popen(
            [
                sys.executable,
                *(torchrun if num_ranks else ()),
                str(HERE / "integration_rows" / script),
                str(folder),
                *strategies,
            ],
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output = process.communicate(timeout=limit_seconds)[0]
        except subprocess.TimeoutExpired:
            # With the launcher its ranks, which would outlive it.
            os.killpg(process.pid, signal.SIGKILL)
            raise
        if process.returncode:
            sys.exit(f"{script} failed:\n{output[-6000:]}")
        found |= json.loads((folder / "found.json").read_text())
    return found


def held(row: dict[str, Any]) -> bool:
    return all(distance <= row["bound"] for distance in row["distance"].values())


def table(rows: dict[str, Any]) -> str:
    lines = [f"| scenario | {' | '.join(f'`{name}`' for name in STRATEGIES)} |", "|---" * (1 + len(STRATEGIES)) + "|"]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(_cell(row['distance'].get(strategy)) for strategy in STRATEGIES)} |")
    return "\n".join(lines)


def _cell(distance: float | None) -> str:
    if distance is None:
        return "–"
    return "equal" if distance == 0 else f"within {distance:.1g}"


def write(found: dict[str, dict[str, Any]]) -> None:
    """Results and page; groups that did not run keep what they had."""
    before = json.loads(RESULTS.read_text())["groups"] if RESULTS.exists() else {}
    groups = {name: found.get(name, before.get(name)) for name in GROUPS if name in found or name in before}
    RESULTS.write_text(json.dumps({"command": "python benchmarks/integrations.py", "groups": groups}, indent=1) + "\n")
    rows = {name: row for group in groups.values() for name, row in group["rows"].items()}
    versions = {name: number for group in groups.values() for name, number in group["versions"].items()}
    text = PAGE.read_text()
    start, rest = text.split(BEGIN)
    told = ", ".join(f"{name} {number}" for name, number in versions.items())
    PAGE.write_text(f"{start}{BEGIN}\n{table(rows)}\n\nRun with {told}.\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(GROUPS), default=list(GROUPS))
    parser.add_argument("--limit", type=float, default=300, help="seconds per script")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES, help="with --json only")
    parser.add_argument("--json", action="store_true", help="print what was found, and write nothing")
    asked = parser.parse_args()
    if not asked.json and set(asked.strategies) != set(STRATEGIES):
        parser.error("the table holds all strategies: --strategies goes with --json")
    found: dict[str, dict[str, Any]] = {}
    for name in asked.only:
        group = GROUPS[name]
        if group.missing():
            print(f"{name}: left out, not installed: {', '.join(group.missing())}", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows = run(group, folder=Path(folder), strategies=asked.strategies, limit_seconds=asked.limit)
        packages = ("torch", *group.packages)
        found[name] = {"rows": rows, "versions": {package: importlib.metadata.version(package) for package in packages}}
    if asked.json:
        print(json.dumps(found))
    else:
        write(found)
    rows = {name: row for group in found.values() for name, row in group["rows"].items()}
    for name, row in rows.items():
        if not held(row):
            print(f"{name}: {row['distance']}, must be within {row['bound']}", file=sys.stderr)
    sys.exit(0 if all(map(held, rows.values())) else 1)


if __name__ == "__main__":
    main()
