"""The memory of a training step: measured, and compared with what was predicted.

    python benchmarks/validate_memory.py --measure --out measured.json           all cases, on the GPU
    python benchmarks/validate_memory.py --measure --device cpu --out m.json     tiny models, on the CPU
    python benchmarks/validate_memory.py --two-ranks --out two_ranks.json        a rehearsal against two real ranks
    python benchmarks/validate_memory.py --predict measured.json                 the planner's numbers for them

Cases (memory_cases.py) are of our engine and of torch's, at one rank, which is real, and in rehearsal at 8, 64 and
1024: rank 0 alone, with the others absent. Processes measure many cases each (memory_worker.py), one at a time, since
device_bytes are those of the whole device. A row has

    allocated_bytes   the most bytes that were live in a step in steady state (torch.cuda.max_memory_allocated)
    requested_bytes   the same before the allocator's rounding to 512
    rest_bytes        what is live after zero_grad: the states
    reserved_bytes    what the allocator holds (torch.cuda.max_memory_reserved)
    device_bytes      what is in use on the device, context and communicators included
    before_bytes      what was live before the model was made, and should be 0
    left_bytes        what could not be freed after it; the process is replaced if that is much
    error             why there is no number
"""

import argparse
import json
import tempfile
import time
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from measuring import circumstances, write
from memory_cases import LARGE, SMALL, all_cases, two_rank_cases
from memory_predictions import compare, report
from memory_worker import Job, serve
from training_case import Case
from workers import ProcessFailed, on_ranks

START_SECONDS = 120.0

Row = dict[str, Any]


def _line(row: Row) -> str:
    if row["error"]:
        return row["error"]
    found = {name: row[f"{name}_bytes"] for name in ("allocated", "reserved", "device")}
    parts = [f"{name} {num_bytes / 2**20:9.1f}" for name, num_bytes in found.items() if num_bytes is not None]
    steady = "" if len(set(row["allocated_bytes_by_step"])) == 1 else "  not steady"
    left = "" if row["left_bytes"] < 2**20 else f"  left {row['left_bytes'] / 2**20:.0f} MiB"
    return f"{'  '.join(parts)} MiB{steady}{left}  {row['seconds']:5.1f} s"


def measure(cases: list[tuple[Case, bool]], *, device: str, limit_seconds: float, out: Path | None) -> list[Row]:
    """Measure cases, each real or with absent ranks, as far as time goes."""
    data: dict[str, Any] = {**circumstances(), "workers": [], "rows": []}
    deadline = time.monotonic() + limit_seconds
    for (num_ranks, absent), group in groupby(cases, key=lambda item: (item[0].num_ranks, item[1])):
        waiting = [case for case, _ in group]
        while waiting and (left := deadline - time.monotonic()) > 0:
            started, rows = _in_processes(waiting, num_ranks, absent=absent, device=device, seconds=left)
            data["workers"] += started
            data["rows"] += rows
            for case, row in zip(waiting, rows, strict=False):
                print(f"{case} {_line(row)}", flush=True)
            waiting = waiting[len(rows) :]
            write(out, data)
    print(f"{len(data['rows'])} of {len(cases)} cases were measured")
    return data["rows"]


def _in_processes(
    cases: list[Case], num_ranks: int, *, absent: bool, device: str, seconds: float
) -> tuple[list[Row], list[Row]]:
    """Measure cases in fresh processes; return what these say of themselves, and a row for each case."""
    num_processes = 1 if absent else num_ranks
    with tempfile.TemporaryDirectory() as folder:
        job = Job(device=device, num_ranks=num_ranks, absent=absent, folder=folder, seconds=seconds)
        died = True
        with suppress(ProcessFailed):
            on_ranks(serve, job, cases, num_ranks=num_processes, device=None, limit_seconds=seconds + START_SECONDS)
            died = False
        path = Path(folder, "rows.jsonl")
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [row for row in found if "error" in row]
    if died and len(rows) < len(cases):
        rows.append(cases[len(rows)].as_data() | {"error": "its process died, or took too long", "seconds": None})
    return [row for row in found if "error" not in row], rows


def measure_two_ranks(*, device: str, out: Path | None) -> None:
    """Measure two real ranks on one device, and a rehearsal of the first. device_bytes are of both ranks together."""
    cases = two_rank_cases(LARGE if device == "cuda" else SMALL)
    asked = [(case, absent) for absent in (False, True) for case in cases]
    peaks = [row.get("allocated_bytes") for row in measure(asked, device=device, limit_seconds=520.0, out=out)]
    for case, real, rehearsed in zip(cases, peaks[: len(cases)], peaks[len(cases) :], strict=True):
        if real and rehearsed:
            print(f"{case} rehearsed / real = {rehearsed / real:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--measure", action="store_true", help="measure all cases")
    what.add_argument("--two-ranks", action="store_true", help="two real ranks against their rehearsal")
    what.add_argument("--predict", type=Path, metavar="MEASURED.json", help="compare with what the planner says")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit-seconds", type=float, default=520.0, help="start no case after this")
    parser.add_argument("--only", default="", help="cases whose printed line contains this text")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    asked = parser.parse_args()
    if asked.predict is not None:
        print("\n".join(report(compare(json.loads(asked.predict.read_text())["rows"]))))
    elif asked.two_ranks:
        measure_two_ranks(device=asked.device, out=asked.out)
    else:
        found = all_cases(LARGE if asked.device == "cuda" else SMALL)
        cases = [(case, case.num_ranks > 1) for case in found if asked.only in str(case)]
        measure(cases, device=asked.device, limit_seconds=asked.limit_seconds, out=asked.out)


if __name__ == "__main__":
    main()
