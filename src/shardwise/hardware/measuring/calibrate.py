"""Measures this device, row by row; fit.py makes its table from the rows.

python -m shardwise.hardware.measuring.calibrate --rows ROWS.json [--device cuda|cpu] [--only fp8|host_memory]

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

from shardwise.hardware.measuring.measure import Stopwatch
from shardwise.hardware.measuring.measure_host import dispatch_rows, update_rows
from shardwise.hardware.measuring.measure_host_memory import measured_host_memory
from shardwise.hardware.measuring.probe import Probe, cpu_probes, cuda_probes

CalibrationRow = dict[str, Any]
Progress = Callable[[int, int], None]

LIMIT_SECONDS = 240.0
_HOST_MEMORY = "host_memory"


def measure_device(
    device: torch.device,
    *,
    progress: Progress = lambda done, total: None,
    limit_seconds: float = LIMIT_SECONDS,
    only: str = "",
) -> dict[str, Any]:
    """Return the measured rows and a description of the device. Kernels left after `limit_seconds` are skipped.

    `only`: nothing but the kernels of this dtype, or the host memory, to be added to a full calibration.
    """
    began = time.monotonic()
    about = _about(device)
    if device.type == "cuda" and only in ("", _HOST_MEMORY):
        about["host_memory"] = measured_host_memory(device).to_data()
    probes = cuda_probes() if device.type == "cuda" else cpu_probes()
    probes = [probe for probe in probes if not only or probe.dtype == only]
    rows: list[CalibrationRow] = [] if only else [*dispatch_rows(device), *update_rows(device)]
    # The rows of the host count as one step of the progress.
    total = len(probes) + 1
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


def _spread(probes: list[Probe]) -> Iterator[Probe]:
    """Yield every third probe, then those between, so that a limit thins out all kinds of kernels equally."""
    for start in range(3):
        yield from probes[start::3]


def _measured(probe: Probe, *, stopwatch: Stopwatch) -> CalibrationRow:
    """Return the row of a probe; if this device or this torch lacks the kernel, the row holds the error."""
    if not stopwatch.fits(probe):
        return probe.row(seconds=0.0) | {"error": "does not fit"}
    try:
        row = probe.row(seconds=stopwatch.seconds(probe))
    except (RuntimeError, ValueError) as error:
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
        # Correct only if no other process uses the device.
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
    parser.add_argument(
        "--only", default="", help="a dtype, whose kernels are measured, or host_memory (default: everything)"
    )
    options = parser.parse_args()
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    measured = measure_device(device, limit_seconds=options.limit_seconds, only=options.only)
    options.rows.write_text(json.dumps(measured, indent=None).replace('{"name"', '\n{"name"') + "\n")
    rows, failed = measured["rows"], [row for row in measured["rows"] if "error" in row]
    print(f"{len(rows)} rows in {measured['seconds']} s, {len(failed)} failed, {measured['left_out']} left out")
    for row in failed[:5]:
        print(row)


if __name__ == "__main__":
    main()
