"""Measures this device, row by row; fit.py makes its table of them.

python -m shardwise.hardware.calibrate --rows ROWS.json [--device cuda|cpu] [--missing]

With --missing, only kernels that the file does not have yet are measured, and added to it.

A row is a kernel, a kind of layer, an optimizer or a collective at one size, with the seconds that it took.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from shardwise.hardware.measure import Stopwatch
from shardwise.hardware.measure_host import dispatch_rows, host_copy_rows, update_rows
from shardwise.hardware.probe import Probe, cpu_probes, cuda_probes, probe_of

CalibrationRow = dict[str, Any]
Progress = Callable[[int, int], None]

LIMIT_SECONDS = 240.0


def measure_device(
    device: torch.device, *, progress: Progress = lambda done, total: None, limit_seconds: float = LIMIT_SECONDS
) -> dict[str, Any]:
    """What was measured, and on what. After `limit_seconds` the kernels that are left are left out."""
    began = time.monotonic()
    about = _about(device)
    probes = cuda_probes() if device.type == "cuda" else cpu_probes()
    # The host's rows are few, and count as one step each.
    rows: list[CalibrationRow] = []
    total = len(probes) + 1
    rows += [*dispatch_rows(device), *update_rows(device), *host_copy_rows(device)]
    progress(1, total)
    left_out = 0
    stopwatch = Stopwatch(device)
    for number, probe in enumerate(_spread(probes)):
        if time.monotonic() - began > limit_seconds:
            left_out = len(probes) - number
            break
        rows.append(_measured(probe, stopwatch=stopwatch))
        progress(2 + number, total)
    return about | {"left_out": left_out, "seconds": round(time.monotonic() - began, 1), "rows": rows}


def with_missing(measured: dict[str, Any], *, device: torch.device) -> dict[str, Any]:
    """What was measured before, and the kernels that are new since then."""
    known = {probe_of(row) for row in measured["rows"] if "dims" in row}
    stopwatch = Stopwatch(device)
    probes = cuda_probes() if device.type == "cuda" else cpu_probes()
    rows = [_measured(probe, stopwatch=stopwatch) for probe in probes if probe not in known]
    return measured | {"rows": [*measured["rows"], *rows]}


def _spread(probes: list[Probe]) -> Iterator[Probe]:
    """Every third, then those between: what a limit cuts off is then missing everywhere a little."""
    for start in range(3):
        yield from probes[start::3]


def _measured(probe: Probe, *, stopwatch: Stopwatch) -> CalibrationRow:
    """The row of a probe; a kernel that this device or this torch does not have is its error, and no reason to stop."""
    if not stopwatch.fits(probe):
        return probe.row(seconds=0.0) | {"error": "does not fit"}
    try:
        row = probe.row(seconds=stopwatch.seconds(probe))
    except RuntimeError as error:
        row = probe.row(seconds=0.0) | {"error": " ".join(str(error).split())[:200]}
    if stopwatch.stream is not None and probe.num_bytes > 2**26:
        torch.cuda.empty_cache()
    return row


def _about(device: torch.device) -> dict[str, Any]:
    about: dict[str, Any] = {"device": device.type, "torch": torch.__version__, "python": platform.python_version()}
    if device.type != "cuda":
        return about | {"title": platform.processor() or platform.machine(), "num_threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return about | {
        "title": properties.name,
        "capacity_bytes": properties.total_memory,
        # Of a device that nobody else uses.
        "context_bytes": total - free,
        "num_processors": properties.multi_processor_count,
        "cache_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=Path, required=True, help="where the measurements go, as JSON")
    parser.add_argument("--limit-seconds", type=float, default=LIMIT_SECONDS)
    parser.add_argument("--missing", action="store_true", help="measure the kernels that the file lacks, and add them")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if options.missing:
        measured = with_missing(json.loads(options.rows.read_text()), device=device)
    else:
        measured = measure_device(device, limit_seconds=options.limit_seconds)
    options.rows.write_text(json.dumps(measured, indent=None).replace('{"name"', '\n{"name"') + "\n")
    rows, failed = measured["rows"], [row for row in measured["rows"] if "error" in row]
    print(f"{len(rows)} rows in {measured['seconds']} s, {len(failed)} failed, {measured['left_out']} left out")
    for row in failed[:5]:
        print(row)


if __name__ == "__main__":
    main()
