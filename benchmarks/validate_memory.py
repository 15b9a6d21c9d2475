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
import multiprocessing
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from memory_cases import LARGE, SMALL, Case, all_cases, two_rank_cases
from memory_worker import Job, serve

START_SECONDS = 120.0
CASE_SECONDS = 60.0
# What is left of a case is told in its row and the next one's; with this much a process is replaced.
LEFT_BYTES = 64 * 2**20

Row = dict[str, Any]


class Gone(Exception):  # noqa: N818
    """A process that does not answer any more."""


class Crew:
    """The processes of a job: all of its ranks, or the one that rehearses. They come when they are first needed."""

    def __init__(self, jobs: list[Job]) -> None:
        self.started: list[Row] = []
        self._jobs = jobs
        self._members: list[tuple[Any, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._dismiss()

    def measure(self, case: Case) -> Row:
        """Rank 0's row, with the peaks of the others."""
        try:
            if not self._members:
                self._gather()
            for _, connection in self._members:
                connection.send(case)
            rows: list[Row] = [self._answer(rank, within_seconds=CASE_SECONDS) for rank in range(len(self._jobs))]
        except (Gone, BrokenPipeError) as error:
            self._dismiss(kill=True)
            return case.as_data() | {"error": f"{type(error).__name__}: {error}", "seconds": None}
        if any(row["left_bytes"] > LEFT_BYTES for row in rows):
            self._dismiss()
        return rows[0] | {"other_ranks": [row.get("allocated_bytes") for row in rows[1:]]}

    def _gather(self) -> None:
        context = multiprocessing.get_context("spawn")
        for job in self._jobs:
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, job), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        self.started += [self._answer(rank, within_seconds=START_SECONDS) for rank in range(len(self._jobs))]

    def _answer(self, rank: int, *, within_seconds: float) -> Any:
        connection = self._members[rank][1]
        try:
            if connection.poll(within_seconds):
                return connection.recv()
        except (EOFError, ConnectionResetError):
            raise Gone(f"the process of rank {rank} died") from None
        raise Gone(f"rank {rank} took longer than {within_seconds:.0f} s")

    def _dismiss(self, *, kill: bool = False) -> None:
        for process, connection in self._members:
            if not kill and process.is_alive():
                connection.send(None)
                process.join(20)
            process.kill()
            process.join()
        self._members.clear()


@contextmanager
def crew(case: Case, *, device: str, absent: bool) -> Iterator[Crew]:
    """The crew for a case's number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = range(1 if absent else case.num_ranks)
        jobs = [Job(device=device, rank=rank, num_ranks=case.num_ranks, absent=absent, folder=folder) for rank in ranks]
        with Crew(jobs) as found:
            yield found


class Results:
    """The rows so far; written after each, so that a run that is cut off has lost none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._data: Row = {"command": shlex.join(["python", *sys.argv]), "workers": [], "rows": []}

    def add(self, row: Row, *, number: str, case: Case) -> None:
        self._data["rows"].append(row)
        self._write()
        seconds = row["seconds"]
        print(f"{number} {case} {_shown(row)} {'' if seconds is None else f'{seconds:5.1f} s'}", flush=True)

    def add_workers(self, started: list[Row]) -> None:
        self._data["workers"] += started
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(self._data, indent=1) + "\n")


def _shown(row: Row) -> str:
    if row["error"]:
        return row["error"]
    parts = []
    for name in ("allocated", "reserved", "device"):
        num_bytes = row[f"{name}_bytes"]
        parts += [] if num_bytes is None else [f"{name} {num_bytes / 2**20:9.1f}"]
    steady = "" if len(set(row["allocated_bytes_by_step"])) == 1 else "  not steady"
    left = "" if row["left_bytes"] < 2**20 else f"  left {row['left_bytes'] / 2**20:.0f} MiB"
    return "  ".join(parts) + " MiB" + steady + left


def measure(*, device: str, limit_seconds: float, out: Path | None, only: str) -> None:
    """All cases whose line holds `only`, as far as time goes."""
    results = Results(out)
    deadline = time.monotonic() + limit_seconds
    cases = [case for case in all_cases(LARGE if device == "cuda" else SMALL) if only in str(case)]
    numbered = list(enumerate(cases, start=1))
    for num_ranks, group in groupby(numbered, key=lambda item: item[1].num_ranks):
        members = list(group)
        with crew(members[0][1], device=device, absent=num_ranks > 1) as found:
            for number, case in members:
                if time.monotonic() > deadline:
                    print(f"{limit_seconds:.0f} s are over: {len(cases) - number + 1} cases are not measured")
                    results.add_workers(found.started)
                    return
                results.add(found.measure(case), number=f"{number:3}/{len(cases)}", case=case)
            results.add_workers(found.started)


def measure_two_ranks(*, device: str, out: Path | None) -> None:
    """Two real ranks on one device, and a rehearsal of the first of two. device_bytes are of both ranks together."""
    results = Results(out)
    cases = two_rank_cases(LARGE if device == "cuda" else SMALL)
    peaks: dict[bool, list[int | None]] = {}
    for absent in (False, True):
        peaks[absent] = []
        with crew(cases[0], device=device, absent=absent) as found:
            for case in cases:
                row = found.measure(case)
                peaks[absent].append(row.get("allocated_bytes"))
                results.add(row, number="rehearsed" if absent else "real     ", case=case)
            results.add_workers(found.started)
    for case, real, rehearsed in zip(cases, peaks[False], peaks[True], strict=True):
        if real and rehearsed:
            print(f"{case} rehearsed / real = {rehearsed / real:.4f}")


def predict(measured: Path) -> None:
    """The planner's number for each measured one."""
    from memory_predictions import compare, report

    print("\n".join(report(compare(json.loads(measured.read_text())["rows"]))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--measure", action="store_true", help="measure all cases")
    what.add_argument("--two-ranks", action="store_true", help="two real ranks against their rehearsal")
    what.add_argument("--predict", type=Path, metavar="MEASURED.json", help="compare with what the planner says")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit-seconds", type=float, default=520.0, help="start no case after this")
    parser.add_argument("--only", default="", help="cases whose printed line holds this text")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    if options.predict is not None:
        predict(options.predict)
    elif options.two_ranks:
        measure_two_ranks(device=options.device, out=options.out)
    else:
        measure(device=options.device, limit_seconds=options.limit_seconds, out=options.out, only=options.only)


if __name__ == "__main__":
    main()
