"""Devices, links and calibrations for the page: the tables that its kernel model and its rings read."""

from collections.abc import Iterable
from typing import Any

from shardwise.hardware import Cluster, Device
from shardwise.hardware.borrowed import BorrowedKernelModel, host_factor, kernel_model_of
from shardwise.hardware.calibration import Calibration
from shardwise.hardware.cluster import make_cluster
from shardwise.hardware.device import devices
from shardwise.hardware.kernel_model import Kernel, KernelModel, relative_reach
from shardwise.hardware.prices import prices
from shardwise.planner.engine_model import ENGINE_MODELS
from shardwise.planner.memory.constants import (
    DEFAULT_COMMUNICATOR_BYTES,
    DEFAULT_CONTEXT_BYTES,
    FIRST_COMMUNICATOR_BYTES,
    KERNEL_BYTES,
    RULES,
)
from shardwise.planner.overhead import SLOWDOWN
from shardwise.planner.search.recommend import PAIR_BAND
from shardwise.planner.time.band import HOST, HOST_BOUND, HOST_MEASURED, NODES, OFFLOADED, PARTS, kernels_fact
from shardwise.planner.time.collective import PROTOCOLS, TREE_BANDWIDTH, can_link, link_speed
from shardwise.planner.time.compute import RECOMPUTE_ISSUES, can_time
from shardwise.planner.time.host_link import NODE_BYTES_PER_S, host_memory_speed
from shardwise.planner.time.step_time import MOST_ISSUED, STEPS_UNTIL_STEADY
from shardwise.planner.time.straggler import MANY, PAUSE_SECONDS, PAUSED_SHARE, SPREAD, expected_maximum
from shardwise.report.planner_page.page_plans import DEVICE_COUNTS, PER_NODE

_RELATIVE = ("matmul", "attention", "rms_norm", "rms_norm_backward")
"""Kernels whose speed, relative to the calibration, may be specific to a device."""


def offered_devices() -> list[Device]:
    """Return the package's devices whose capacity, speeds and links are known."""
    gpus = [device for device in devices().values() if device.name != "cpu" and device.capacity_bytes is not None]
    return [device for device in gpus if can_time(device) and can_link(_node(device))]


def _node(device: Device) -> Cluster:
    return make_cluster(device, num_nodes=1, devices_per_node=PER_NODE, fabric=None)


def hardware_data(offered: Iterable[Device]) -> dict[str, Any]:
    """Return the tables of the devices, and the constants of the planner.

    price          of a device: dollars per GPU-hour, where it is from, and its day; null if none is listed
    calibrations   measurements of kernels (`_calibration`); a device refers to its own or to a borrowed one
    issues         seconds of the CPU to issue operations; a device refers to one of these, too
    """
    calibrations: dict[int, tuple[int, Calibration]] = {}
    issues: list[dict[str, Any]] = []
    found = {}
    waiting = {device.name: device for device in offered}
    while waiting:
        name, device = waiting.popitem()
        model = kernel_model_of(device)
        if isinstance(model, BorrowedKernelModel) and model.lender.device.name not in found:
            waiting[model.lender.device.name] = model.lender.device
        number, _ = calibrations.setdefault(id(model.calibration.points), (len(calibrations), model.calibration))
        table = {op: list(seconds) for op, seconds in model.calibration.launch_seconds.items()}
        if table not in issues:
            issues.append(table)
        found[name] = _device(model) | {"calibration": number, "issues": issues.index(table)}
    order = [device.name for device in offered]
    listed = prices()
    for name in order:
        price = listed.get(name)
        found[name]["price"] = None if price is None else [price.per_gpu_hour, price.source, price.date]
    return {
        "devices": {name: found[name] for name in [*order, *(name for name in found if name not in order)]},
        "offered": order,
        "calibrations": [_calibration(calibration) for _, calibration in calibrations.values()],
        "issues": issues,
        **_constants(),
    }


def _device(model: KernelModel) -> dict[str, Any]:
    device = model.device
    node = _node(device)
    reaches = {name: relative_reach(device, Kernel(name, "bf16", 1.0, 1.0, (1.0,))) for name in _RELATIVE}
    bf16 = device.flops_per_s("bf16")
    return {
        "title": device.title,
        "capacity": device.capacity_bytes.value if device.capacity_bytes is not None else None,
        "outside": _outside(device),
        "communicator": device.communicator_bytes.value if device.communicator_bytes else DEFAULT_COMMUNICATOR_BYTES,
        "memory_bytes_per_s": model.memory_bytes_per_s,
        "peak": model.peak("bf16"),
        "fp32_peak": model.peak(""),
        "mfu_peak": bf16.value if bf16 is not None else None,
        "num_processors": model.num_processors,
        "lender": model.lender.device.name if isinstance(model, BorrowedKernelModel) else None,
        "processors": model.processors if isinstance(model, BorrowedKernelModel) else 1.0,
        "is_own": model.is_own,
        "relative_reach": reaches,
        "update": list(model.calibration.update.get("adamw", model.calibration.update["adamw-fused"])),
        "host_factor": host_factor(device),
        "host_link": _host_link(device),
        "link": link_speed(node.link) if node.link is not None else None,
        "fabric": _fabric(device),
        "kernels_band": PARTS[kernels_fact(device)],
        "host_band": PARTS[HOST if device.host is None and device.calibration is None else HOST_MEASURED],
    }


def _host_link(device: Device) -> list[float] | None:
    """Return the speed of copies to or from host memory, in one direction and in both at once; None if unknown."""
    if device.host_link is None:
        return None
    speed = host_memory_speed(device)
    return [speed.copy_bytes_per_s, speed.both_bytes_per_s]


def _outside(device: Device) -> int:
    """Return the bytes that a process with one communicator holds outside the allocator."""
    context = device.context_bytes.value if device.context_bytes else DEFAULT_CONTEXT_BYTES
    has_communicators = device.communicator_bytes is None or device.communicator_bytes.value != 0
    return context + KERNEL_BYTES + (FIRST_COMMUNICATOR_BYTES if has_communicators else 0)


def _fabric(device: Device) -> dict[str, Any] | None:
    """Return the usual fabric between nodes of 8 such devices; None if it is unknown."""
    if device.nic is None:
        return None
    fabric = make_cluster(device, num_nodes=2, devices_per_node=PER_NODE, fabric=None).fabric
    assert fabric is not None
    speed, latency = link_speed(fabric.link)
    return {"name": str(fabric), "speed": [fabric.num_links * speed, latency]}


def _calibration(calibration: Calibration) -> dict[str, Any]:
    """Return the calibration of 16-bit kernels, and of kernels without a dtype."""
    keys = [key for key in calibration.points if not key.endswith((" fp32", " fp16", " tf32"))]
    return {
        "kernel_seconds": calibration.kernel_seconds,
        "reach": dict(calibration.reach),
        "points": {key: [[*sizes, ratio] for sizes, ratio in calibration.points[key]] for key in keys},
    }


def _constants() -> dict[str, Any]:
    engine = ENGINE_MODELS["shardwise"]
    nodes = sorted({max(1, count // PER_NODE) for count in DEVICE_COUNTS})
    return {
        "counts": list(DEVICE_COUNTS),
        "per_node": PER_NODE,
        "block_bytes": RULES["cuda"].block_bytes,
        "workspace_bytes": RULES["cuda"].workspace_bytes,
        "memory_band": engine.error_band,
        "pair_band": PAIR_BAND,
        "nodes_band": PARTS[NODES],
        "host_bound": HOST_BOUND,
        "offloaded_band": PARTS[OFFLOADED],
        "node_host_bytes_per_s": NODE_BYTES_PER_S,
        "most_issued": MOST_ISSUED,
        "steps_until_steady": STEPS_UNTIL_STEADY,
        "slowdown": SLOWDOWN,
        "recompute_issues": RECOMPUTE_ISSUES,
        "protocols": [[one.base_seconds, one.hop, one.bandwidth] for one in PROTOCOLS],
        "tree_bandwidth": TREE_BANDWIDTH,
        "spread": SPREAD,
        "paused_share": PAUSED_SHARE,
        "pause_seconds": PAUSE_SECONDS,
        "many_pauses": MANY,
        "expected_maximum": {str(count): expected_maximum(count) for count in nodes},
    }
