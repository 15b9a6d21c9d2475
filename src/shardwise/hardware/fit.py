"""What `calibrate` measured → the numbers of a device and of its link. No torch here: it can be done elsewhere."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log2
from statistics import harmonic_mean, median
from typing import Any

from shardwise.errors import InvalidData
from shardwise.hardware.calibration import Calibration
from shardwise.hardware.device import Device
from shardwise.hardware.kernel_model import BY_COLUMNS, Kernel, KernelModel, attention, product
from shardwise.hardware.probe import Probe, probe_of
from shardwise.hardware.sourced import Sourced

Rows = Sequence[Mapping[str, Any]]


def kernel_of_probe(probe: Probe) -> Kernel:
    """The kernel as the planner would describe it."""
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
    """The numbers of a device whose peaks are known."""
    rows, is_host = shared(measured), measured["device"] == "cpu"
    timed = _timed(rows)
    # A call is a kernel, and what is between it and the next: the least of them.
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
    )
    groups: dict[str, list[tuple[Kernel, float]]] = defaultdict(list)
    for kernel, seconds in timed:
        groups[kernel.key].append((kernel, seconds))
    model = KernelModel(replace(device, calibration=rough), calibration=rough, is_own=True)
    reach = {key: _reach(group, model=model) for key, group in groups.items()}
    if "widen" in reach and "narrow" in reach:
        # A trace does not tell them apart; a step has as many casts of the one kind as of the other.
        reach["cast"] = harmonic_mean((reach["widen"], reach["narrow"]))
    reached = replace(rough, reach=reach)
    model = KernelModel(replace(device, calibration=reached), calibration=reached, is_own=True)
    return replace(reached, points={key: _points(group, model=model) for key, group in groups.items()})


def shared(measured: Mapping[str, Any]) -> Rows:
    """The rows as they are where several ranks share a core: measured is the time on it, which each gets in turn."""
    factor = max(measured.get("ranks_per_core", 1.0), 1.0)
    if factor == 1.0:
        return list(measured["rows"])
    times = ("seconds", "forward", "backward", "launch")
    # Collectives were measured as they are.
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
    """Of the larger half of a kernel's sizes, the median."""
    by_time = sorted(group, key=lambda pair: pair[1])
    by_time = by_time[len(by_time) // 2 :]
    parts = [
        model.law(kernel) / max(seconds - model.start_seconds(kernel), 0.1 * seconds) for kernel, seconds in by_time
    ]
    return median(parts) or 1.0


def _points(
    group: Sequence[tuple[Kernel, float]], *, model: KernelModel
) -> tuple[tuple[tuple[float, ...], float], ...]:
    return tuple(
        (tuple(round(log2(size), 3) for size in kernel.sizes), round(seconds / model.seconds(kernel), 4))
        for kernel, seconds in group
    )


_IN_A_STEP = 1.45
"""What the CPU needs to issue an operation among a model's others, by what it needs in a loop over one layer: there its
caches are warm, and there are no views. Fitted to torch's DDP in benchmarks/results/step_times_h200.json."""

_LAYER_IN_A_STEP, _OTHER_IN_A_STEP = 1.6, 1.3
"""The same on a GPU's host, of operations that are measured as layers and of all others: views stand around products
and attention, and chains of elementwise operations have few. Of five pairs the one that is nearest to the fitted rows
of benchmarks/results/host_probe_h200.json."""

# Of the layer that has nothing else (measure_host.py).
_NUM_VIEWS = 4
# kind of layer → its operations that autograd issues
_BACKWARD_OPS = {"linear": 3, "linear_without_bias": 2}
# operation → the kind of layer whose issue it costs
_ISSUED_AS = {
    "addmm": "linear",
    "mm": "linear_without_bias",
    "native_layer_norm": "layer_norm",
    "native_layer_norm_backward": "layer_norm",
    "_fused_rms_norm": "rms_norm",
    "_fused_rms_norm_backward": "rms_norm",
    "_scaled_dot_product_flash_attention": "attention",
    "_scaled_dot_product_flash_attention_backward": "attention",
    "convolution": "convolution",
    "convolution_backward": "convolution",
    "native_batch_norm": "batch_norm",
    "native_batch_norm_backward": "batch_norm",
}
ISSUED_BY_ITSELF = frozenset(_ISSUED_AS)
"""Operations whose issue is measured as that of a layer, with its node of autograd's graph."""


def launches_of(rows: Rows, *, kernel_seconds: float, is_host: bool) -> dict[str, tuple[float, float]]:
    """Operation → the CPU's seconds to issue it, in forward and in backward.

    "node": for each node of autograd's graph, of which one issues several operations. Views are nodes that issue none;
    of what the backward of an addition takes, the rest is its operation.

    Where the CPU is the device, a kernel's own time has all of that in it but what autograd and modules add.
    """
    layers = {row["role"]: row for row in rows if row["name"] == "dispatch"}
    if "add" not in layers:
        raise InvalidData("there is no dispatch among what was measured")
    call = (_IN_A_STEP * layers["add"]["forward"], _IN_A_STEP * layers["add"]["backward"])
    if is_host:
        return {"call": call, "other": (max(call[0] - kernel_seconds, 0.0), max(call[1] - kernel_seconds, 0.0))}
    issued = {
        op: (
            _LAYER_IN_A_STEP * layers[layer]["forward"],
            _LAYER_IN_A_STEP * layers[layer]["backward"] / _BACKWARD_OPS.get(layer, 1),
        )
        for op, layer in _ISSUED_AS.items()
        if layer in layers
    }
    node = layers["view"]["backward"] / _NUM_VIEWS if "view" in layers else 0.0
    other = (layers["add"]["forward"], max(layers["add"]["backward"] - node, 0.0))
    others = {"node": (0.0, node), "other": other}
    return {"call": call} | issued | {op: (_OTHER_IN_A_STEP * a, _OTHER_IN_A_STEP * b) for op, (a, b) in others.items()}


# optimizer → bytes an element that its step reads and writes: parameter, gradient and moments, all in fp32
_UPDATE_BYTES = {"adamw-fused": 28.0, "adamw-foreach": 28.0, "sgd": 20.0}


def _updates(rows: Rows, *, device: Device, is_host: bool) -> dict[str, tuple[float, float, float, float]]:
    """Of an optimizer's step: the CPU's seconds, more for each tensor, bytes an element, part of the peak."""
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
        # A device works while the next step is issued; a CPU does not.
        issued = issue + more * large["num_tensors"] if is_host else 0.0
        busy = max(large["seconds"] - issued, 0.1 * large["seconds"])
        reach = num_bytes * large["num_elements"] / busy / device.memory_bytes_per_s.value
        found[name] = (_IN_A_STEP * issue, _IN_A_STEP * more, num_bytes, reach)
    return found


def measured_peaks(rows: Rows, *, source: str) -> dict[str, Sourced[float]]:
    """For a device that no datasheet is at hand of: the most that any kernel reached."""
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
    """Latency and bandwidth of the links between ranks, from collectives; None where there are none.

    An all-reduce is 2(n−1) rounds of a ring and the others n−1, in each of which a rank passes on 1/n of the bytes:
    t = rounds · (latency + bytes / (n · bandwidth)). The largest size tells the bandwidth, the smallest the latency.
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
