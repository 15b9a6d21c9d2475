"""Measurements of `calibrate` → the numbers of a device and of its link. No torch, so that any machine can do it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log2
from statistics import harmonic_mean, median
from typing import Any

from shardwise.base.errors import InvalidData
from shardwise.hardware.calibration import IN_A_STEP, Calibration, Points, Rows, launches_of
from shardwise.hardware.device import Device
from shardwise.hardware.host_memory_speed import HostMemorySpeed
from shardwise.hardware.kernel_model import BY_COLUMNS, Kernel, KernelModel, attention, product
from shardwise.hardware.measuring.probe import Probe, probe_of
from shardwise.hardware.sourced import Sourced


def kernel_of_probe(probe: Probe) -> Kernel:
    """Return the kernel of a probe as the planner describes it."""
    flops, num_bytes = float(probe.num_flops), float(probe.num_bytes)
    match probe.name.removesuffix("_backward"), probe.dims:
        case "matmul", (m, n, k):
            return product(probe.dtype, (1.0, float(m), float(n), float(k)), role=probe.role, num_bytes=num_bytes)
        case "attention", (batch, heads, _, seq, width):
            dims = (float(batch * heads), float(seq), float(seq), float(width))
            return attention(probe.dtype, dims, backward=probe.is_backward, num_flops=flops, num_bytes=num_bytes)
        case "convolution", (_, inputs, outputs, kernel, _, _):
            weight = float(inputs * outputs * kernel * kernel)
            pixels = flops / (2 * weight)
            return Kernel(probe.name, probe.dtype, flops, num_bytes, (pixels, weight, num_bytes / pixels))
    columns = float(probe.dims[1]) if probe.name in BY_COLUMNS else 1.0
    return Kernel(probe.name, "", 0.0, num_bytes, (num_bytes, columns))


def fit_calibration(measured: Mapping[str, Any], *, device: Device, source: str) -> Calibration:
    """Fit the calibration of a device whose peaks are known."""
    rows, is_host = shared(measured), measured["device"] == "cpu"
    timed = _timed(rows)
    # The fastest call is a tiny kernel and the gap to the next one.
    kernel_seconds = min(seconds for _, seconds in timed)
    rough = Calibration(
        source=source,
        kind="measured",
        kernel_seconds=kernel_seconds,
        reach={},
        points={},
        launch_seconds=launches_of(rows, kernel_seconds=kernel_seconds, is_host=is_host),
        update=_updates(rows, device=device, is_host=is_host),
        ranks_per_core=max(measured.get("ranks_per_core", 1.0), 1.0),
        host_memory=HostMemorySpeed(**measured["host_memory"]) if "host_memory" in measured else None,
    )
    groups: dict[str, list[tuple[Kernel, float]]] = defaultdict(list)
    for kernel, seconds in timed:
        groups[kernel.key].append((kernel, seconds))
    model = KernelModel(replace(device, calibration=rough), calibration=rough, is_own=True)
    reach = {key: _reach(group, model=model) for key, group in groups.items()}
    if "widen" in reach and "narrow" in reach:
        # A trace does not tell them apart; a step has equally many casts of both kinds.
        reach["cast"] = harmonic_mean((reach["widen"], reach["narrow"]))
    reached = replace(rough, reach=reach)
    model = KernelModel(replace(device, calibration=reached), calibration=reached, is_own=True)
    return replace(reached, points={key: _points(group, model=model) for key, group in groups.items()})


def shared(measured: Mapping[str, Any]) -> Rows:
    """Return the rows with wall times: of ranks that share a core, the time on that core was measured."""
    factor = max(measured.get("ranks_per_core", 1.0), 1.0)
    if factor == 1.0:
        return list(measured["rows"])
    times = ("seconds", "forward", "backward", "launch")
    # Collectives were measured by the wall clock.
    return [
        row if "num_ranks" in row else {key: factor * value if key in times else value for key, value in row.items()}
        for row in measured["rows"]
    ]


def _timed(rows: Rows) -> list[tuple[Kernel, float]]:
    timed = [
        (kernel_of_probe(probe_of(row)), float(row["seconds"])) for row in rows if "dims" in row and "error" not in row
    ]
    if not timed:
        raise InvalidData("there is no kernel among what was measured")
    return timed


def _reach(group: Sequence[tuple[Kernel, float]], *, model: KernelModel) -> float:
    """Return the median reach over the slower half of a kernel's sizes."""
    slower = sorted(group, key=lambda pair: pair[1])[len(group) // 2 :]
    parts = [
        model.law(kernel) / max(seconds - model.start_seconds(kernel), 0.1 * seconds) for kernel, seconds in slower
    ]
    return median(parts) or 1.0


def _points(group: Sequence[tuple[Kernel, float]], *, model: KernelModel) -> Points:
    return tuple(
        (tuple(round(log2(size), 3) for size in kernel.sizes), round(seconds / model.seconds(kernel), 4))
        for kernel, seconds in group
    )


# optimizer → bytes per element that its step reads and writes: parameter, gradient and moments, all in fp32
_UPDATE_BYTES = {"adamw-fused": 28.0, "adamw-foreach": 28.0, "sgd": 20.0}


def _updates(rows: Rows, *, device: Device, is_host: bool) -> dict[str, tuple[float, float, float, float]]:
    """Return optimizer → (CPU seconds of a step, seconds per tensor, bytes per element, share of the peak)."""
    assert device.memory_bytes_per_s is not None
    found = {}
    for name, num_bytes in _UPDATE_BYTES.items():
        steps = sorted(
            (row for row in rows if row["name"] == "update" and row["role"] == name), key=lambda row: row["num_tensors"]
        )
        if len(steps) < 3:
            continue
        large, few, many = steps
        more = max(0.0, (many["launch"] - few["launch"]) / (many["num_tensors"] - few["num_tensors"]))
        issue = max(0.0, few["launch"] - more * few["num_tensors"])
        # A GPU computes while the next step is issued; a CPU does not.
        issued = issue + more * large["num_tensors"] if is_host else 0.0
        busy = max(large["seconds"] - issued, 0.1 * large["seconds"])
        reach = num_bytes * large["num_elements"] / busy / device.memory_bytes_per_s.value
        found[name] = (IN_A_STEP * issue, IN_A_STEP * more, num_bytes, reach)
    return found


def measured_peaks(rows: Rows, *, source: str) -> dict[str, Sourced[float]]:
    """Return the most that any kernel reached, for a device without a datasheet."""
    peaks: dict[str, float] = defaultdict(float)
    for row in rows:
        if "dims" not in row or "error" in row:
            continue
        probe = probe_of(row)
        if probe.name == "matmul":
            key, amount = f"{probe.dtype}_flops_per_s", probe.num_flops
        elif probe.name in ("copy", "add") and probe.cold:
            key, amount = "memory_bytes_per_s", probe.num_bytes
        else:
            continue
        peaks[key] = max(peaks[key], amount / row["seconds"])
    return {key: Sourced(value=value, source=source, kind="measured") for key, value in peaks.items()}


def fit_link(rows: Rows, *, source: str) -> dict[str, dict[str, Any]] | None:
    """Fit latency and bandwidth of the links between ranks to measured collectives; None if there are none.

    An all-reduce takes 2(n−1) rounds of a ring, the others n−1; in each round a rank passes on 1/n of the bytes:
    t = rounds · (latency + bytes / (n · bandwidth)). The largest size gives the bandwidth, the smallest the latency.
    """
    by_name: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["name"] in ("all_reduce", "all_gather", "reduce_scatter"):
            by_name[row["name"]].append(row)
    if not by_name:
        return None
    bandwidths, latencies = [], []
    for name, group in by_name.items():
        small, large = min(group, key=lambda row: row["num_bytes"]), max(group, key=lambda row: row["num_bytes"])
        ranks = large["num_ranks"]
        rounds = (ranks - 1) * (2 if name == "all_reduce" else 1)
        bandwidths.append(rounds * large["num_bytes"] / ranks / large["seconds"])
        latencies.append(small["seconds"] / rounds)
    return {
        "bytes_per_s": {"value": median(bandwidths), "source": source, "kind": "fitted"},
        "latency_seconds": {"value": median(latencies), "source": source, "kind": "fitted"},
    }
