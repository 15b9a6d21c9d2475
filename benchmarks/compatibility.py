"""Which architectures train as in one process, on 2 CPU ranks: `python benchmarks/compatibility.py`.

Tiny models with random weights of transformers' and timm's architectures (compatibility_rows/tiny_models.py), 3 steps
of SGD with momentum under each of our five strategies, and next to them torch's DistributedDataParallel and
`fully_shard` at the same units. The parameters at the end are compared with one process that runs both ranks' batches:

    equal     bit for bit
    close     within 1e-5 of each tensor's largest value, or of a thousandth of the model's largest where that is more:
              a bias whose gradient is truly zero holds only rounding (the distance is shown)
    wrong     further apart
    refused   a line of Shardwise's says why
    failed    an error, or ranks that did not come back

Writes benchmarks/results/compatibility.json after every few architectures, so that a run can be stopped and goes on
where it was; `--again` starts over. Writes docs/compatibility.md at the end. The exit code is 1 if one of ours is wrong
or failed. A library that is not installed is left out.
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
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROWS = HERE / "compatibility_rows"
RESULTS = HERE / "results" / "compatibility.json"
PAGE = HERE.parent / "docs" / "compatibility.md"
COMMAND = "python benchmarks/compatibility.py"
OURS = ("ddp", "zero1", "zero2", "shard_grad_op", "fsdp")
CONTESTANTS = (*OURS, "torch-ddp", "fully_shard")
ALONE = "one process"
PACKAGES = {"hf": "transformers", "timm": "timm"}
# Architectures per start of the ranks, which takes longer than most trainings.
PER_START = 8

Rows = dict[str, dict[str, Any]]


def architectures() -> dict[str, str]:
    """Name → class."""
    if str(ROWS) not in sys.path:
        sys.path.insert(0, str(ROWS))
    from tiny_models import ARCHITECTURES

    return {name: one.class_name for name, one in ARCHITECTURES.items()}


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(PACKAGES[name.split(":")[0]]) is not None


def left_to_do(rows: Rows, names: Sequence[str]) -> list[str]:
    return [
        f"{name}/{contestant}"
        for name in names
        for contestant in CONTESTANTS
        if contestant not in rows.get(name, {}) and rows.get(name, {}).get(ALONE, {}).get("verdict") != "failed"
    ]


def run(jobs: Sequence[str], *, limit_seconds: float) -> Iterator[dict[str, Any]]:
    """What the ranks note; if they end early, the training that they were at has failed."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
                *(str(ROWS / "train_rank.py"), str(notes), *jobs),
            ],
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=(Path(folder) / "said").open("w"),
            start_new_session=True,
        )
        try:
            why = _wait(process, notes, limit_seconds=limit_seconds)
        finally:
            if process.poll() is None:
                # With the launcher its ranks, which would outlive it.
                os.killpg(process.pid, signal.SIGKILL)
        noted = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
        yield from (one for one in noted if "architecture" in one)
        last = noted[-1] if noted else None
        if last is None:
            raise SystemExit(f"the ranks did not start:\n{(Path(folder) / 'said').read_text()[-3000:]}")
        if "begins" in last:
            yield {"architecture": last["begins"], "contestant": last["contestant"], "verdict": "failed", "line": why}


def _wait(process: "subprocess.Popen[bytes]", notes: Path, *, limit_seconds: float) -> str:
    """Until the ranks have ended, or have noted nothing for the limit; why they are said to have failed."""
    size, since = -1, time.monotonic()
    while process.poll() is None:
        time.sleep(0.2)
        now = notes.stat().st_size if notes.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
        if time.monotonic() - since > limit_seconds:
            return f"the ranks did not come back within {limit_seconds:.0f} s"
    return f"the ranks ended with exit code {process.returncode}"


def read() -> dict[str, Any]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"command": COMMAND, "versions": {}, "rows": {}}


def write(rows: Rows) -> None:
    versions = {
        name: importlib.metadata.version(name)
        for name in ("torch", *PACKAGES.values())
        if importlib.util.find_spec(name) is not None
    }
    text = json.dumps({"command": COMMAND, "versions": versions, "rows": rows}, indent=1)
    RESULTS.with_suffix(".part").write_text(text + "\n")
    RESULTS.with_suffix(".part").replace(RESULTS)


# The page


def cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    verdict = str(found["verdict"])
    return f"{verdict} ({found['distance']:.0e})" if verdict in ("close", "wrong") and "distance" in found else verdict


def page(results: dict[str, Any], *, classes: dict[str, str]) -> str:
    rows: Rows = {name: row for name, row in results["rows"].items() if "parameters" in row.get(ALONE, {})}
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    counts = {library: sum(name.startswith(library + ":") for name in rows) for library in PACKAGES}
    lines = [
        "# Compatibility: which architectures train as in one process",
        "",
        f"{counts['hf']} architectures of transformers and {counts['timm']} of timm, tiny and with random weights, "
        "trained for 3 steps on 2 CPU ranks and compared with one process that runs both ranks' batches. Five "
        "strategies of Shardwise; next to them torch's `DistributedDataParallel` and `fully_shard`, as a script would "
        "call them, the latter on the same units.",
        "",
        f"Written by `{COMMAND}` with {versions}. *equal*: all parameters bit for bit. *close*: within 1e-5 of each "
        "tensor's largest value, or of a thousandth of the model's largest where that is more. *wrong*: further apart. "
        "*refused*: one line of Shardwise's says why. *failed*: an error.",
        "",
        "Torch's engines are called with their defaults. Where `DistributedDataParallel` says that parameters were not "
        "used, `find_unused_parameters=True` is its way out; Shardwise needs no such option.",
        "",
        "| | " + " | ".join(f"`{name}`" for name in CONTESTANTS) + " |",
        "|---" * (1 + len(CONTESTANTS)) + "|",
    ]
    for verdict in ("equal", "close", "wrong", "refused", "failed"):
        counted = Counter(name for row in rows.values() for name in CONTESTANTS if _is(row.get(name), verdict))
        lines.append(f"| {verdict} | " + " | ".join(str(counted[name]) for name in CONTESTANTS) + " |")
    lines += ["", "## Why", "", "What is not equal and has a line:", ""]
    lines += _reasons(rows)
    lines += ["", "## All", "", "| architecture | class | " + " | ".join(f"`{name}`" for name in CONTESTANTS) + " |"]
    lines.append("|---" * (2 + len(CONTESTANTS)) + "|")
    for name, row in rows.items():
        cells = " | ".join(cell(row.get(contestant)) for contestant in CONTESTANTS)
        lines.append(f"| {name} | {classes.get(name, '')} | {cells} |")
    return "\n".join(lines) + "\n"


def _is(found: dict[str, Any] | None, verdict: str) -> bool:
    return found is not None and found["verdict"] == verdict


def _reasons(rows: Rows) -> list[str]:
    """Each line once, with all that it was said of."""
    said: dict[str, list[str]] = {}
    for name, row in rows.items():
        for contestant in CONTESTANTS:
            line = row.get(contestant, {}).get("line")
            if line:
                said.setdefault(line, []).append(f"{name} under `{contestant}`")
    return [f"- {', '.join(where)}: `{line.replace('`', chr(39))}`" for line, where in said.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="architectures (hf:bert, timm:vit …)")
    parser.add_argument("--again", action="store_true", help="also what has been run before")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing new after that")
    parser.add_argument("--limit", type=float, default=120, help="seconds per training")
    options = parser.parse_args()
    classes = architectures()
    names = options.only or [name for name in classes if is_installed(name)]
    rows: Rows = read()["rows"]
    if options.again:
        rows = {name: row for name, row in rows.items() if name not in names}
    deadline = time.monotonic() + 60 * options.minutes
    while time.monotonic() < deadline:
        jobs = left_to_do(rows, names)
        first = list(dict.fromkeys(job.rpartition("/")[0] for job in jobs))[:PER_START]
        if not first:
            break
        for found in run([job for job in jobs if job.rpartition("/")[0] in first], limit_seconds=options.limit):
            name, contestant = found.pop("architecture"), found.pop("contestant")
            rows.setdefault(name, {})[contestant] = found
        write({name: rows[name] for name in classes if name in rows} | rows)
    PAGE.write_text(page(read(), classes=classes))
    bad = [
        f"{name} under {contestant}: {row[contestant]}"
        for name, row in rows.items()
        for contestant in (ALONE, *OURS)
        if row.get(contestant, {}).get("verdict") in ("wrong", "failed")
    ]
    print(*bad, sep="\n", file=sys.stderr)
    print(f"{len(left_to_do(rows, names))} trainings left to do", file=sys.stderr)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
