"""The calibration of a device: the share of its peaks that kernels reach, and the CPU time to issue them.

A TOML table, which fit.py makes from the measurements of `calibrate`:

    source, kind          of every number in it
    kernel_seconds        the least time from one kernel to the next
    [reach]               kernel → the share it reaches of the peak that bounds it (operations or bytes per second)
    [points]              kernel → [[log2 of its sizes …, measured / predicted], …], which correct predictions nearby
    [launch_seconds]      operation → CPU time to issue it, [forward, backward]; `other` for those not named;
                          `call`: time until one operation is done, by which the speeds of CPUs are compared
    [update]              optimizer → [seconds to issue, seconds per tensor, bytes per element, share of the peak]
    ranks_per_core        on CPUs: how many ranks share a core; all times include that (default: 1)
    [host_memory]         copies to and from host memory, and updates there (host_memory_speed.py), where measured

No torch here, so that any machine can read it.

A small model's step takes as long as the CPU needs to issue it, so its time depends on the host, not on the device.
The host probe measures a `HostSpeed` (probe_host.py). The costs of engines were fitted on the reference host of
calibrated/host.toml; on another host they take `engine_factor` times as long.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import geometric_mean, median
from types import MappingProxyType
from typing import Any

from shardwise.base.errors import InvalidCluster, InvalidData
from shardwise.base.files.form import (
    Form,
    WrongForm,
    anything,
    each,
    inside,
    number,
    one_of,
    record,
    record_of,
    refusing,
    row,
    string,
    table,
)
from shardwise.base.files.keys import key, object_of
from shardwise.hardware.host_memory_speed import HOST_MEMORY_SPEED, HostMemorySpeed
from shardwise.hardware.sourced import KINDS, shipped_table

Points = tuple[tuple[tuple[float, ...], float], ...]
"""(log2 of sizes, measured / predicted), …"""

NUM_SIZES: Mapping[str, int] = MappingProxyType({"matmul": 4, "attention": 5, "convolution": 3})
"""Kernel → how many sizes a point of it has; all other kernels have 2."""

# Above any size, time and ratio; of larger ones the predictions would be no numbers.
_MOST = 1e18
_MOST_LOG2 = 128.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """The numbers of one calibration, compared by identity: it is a cache key."""

    source: str
    kind: str
    kernel_seconds: float
    reach: Mapping[str, float]
    points: Mapping[str, Points]
    launch_seconds: Mapping[str, tuple[float, float]]
    update: Mapping[str, tuple[float, float, float, float]]
    ranks_per_core: float = 1.0
    host_memory: HostMemorySpeed | None = None

    def as_table(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "kind": self.kind,
            "kernel_seconds": self.kernel_seconds,
            **({"ranks_per_core": self.ranks_per_core} if self.ranks_per_core != 1.0 else {}),
            **({"host_memory": self.host_memory.to_data()} if self.host_memory is not None else {}),
            "reach": dict(self.reach),
            "launch_seconds": {name: list(values) for name, values in self.launch_seconds.items()},
            "update": {name: list(values) for name, values in self.update.items()},
            "points": {name: [[*sizes, ratio] for sizes, ratio in points] for name, points in self.points.items()},
        }


def _points(kernels: Mapping[str, Any], path: str) -> dict[str, Points]:
    """Read rows of sizes, as many as the kernel is found by, and a ratio."""
    found = {}
    for kernel, rows in kernels.items():
        num_sizes = NUM_SIZES.get(kernel.partition(" ")[0].removesuffix("_backward"), 2)
        form = each(_numbers(*num_sizes * [_SIZE], _ABOVE_0), words="a list of rows")
        found[kernel] = tuple((tuple(sizes), ratio) for *sizes, ratio in form(rows, inside(path, kernel)))
    return found


def _numbers(*forms: Form) -> Form:
    return row(*forms, words=f"{len(forms)} numbers")


_NUMBER = Form(
    words=f"a number that is not below 0, at most {_MOST:g}",
    fits=number(least=0, most=_MOST).fits,
    read=lambda value, path: float(value),
)
_ABOVE_0 = _NUMBER.then(Form(words="above 0", fits=lambda value: value > 0))
_SIZE = _NUMBER.then(Form(words=f"the log2 of a size, at most {_MOST_LOG2:g}", fits=lambda value: value <= _MOST_LOG2))
_FORMS = {
    "source": string,
    "kind": one_of(KINDS),
    "ranks_per_core": _ABOVE_0,
    "kernel_seconds": _NUMBER,
    "host_memory": HOST_MEMORY_SPEED,
    "reach": table(_ABOVE_0),
    "points": table(anything).then(_points),
    # The needed rows stand for operations and optimizers that a table does not name.
    "launch_seconds": table(_numbers(_NUMBER, _NUMBER), needs=["other"]),
    "update": table(_numbers(_NUMBER, _NUMBER, _NUMBER, _ABOVE_0), needs=["adamw-fused"]),
}
_OPTIONAL = ("ranks_per_core", "host_memory")
CALIBRATION = record_of(
    _FORMS, needs={name: "`shardwise calibrate` writes it" for name in _FORMS if name not in _OPTIONAL}
).then(lambda values, path: Calibration(**values))
"""The form of a calibration in a file."""


def read_calibration(data: object, *, key: str) -> Calibration:
    """Return the calibration of a TOML table, which `key` names in errors."""
    with refusing(InvalidCluster):
        found: Calibration = CALIBRATION(data, key)
    return found


@cache
def shipped_calibration(name: str) -> Calibration | None:
    """Return the calibration of a device of the package, calibrated/NAME.toml, if it has one."""
    try:
        return read_calibration(shipped_table(f"calibrated/{name}")["calibration"], key=name)
    except FileNotFoundError:
        return None


Rows = Sequence[Mapping[str, Any]]
"""What `calibrate` measured, a row for each kernel and layer."""

IN_A_STEP = 1.45
"""CPU time to issue an operation within a model, relative to a loop over one layer, where caches are warm and there are
no views. Fitted to torch's DDP in benchmarks/results/step_times_h200.json."""

_LAYER_IN_A_STEP, _OTHER_IN_A_STEP = 1.6, 1.3
"""The same on a GPU's host, for operations that are measured as layers and for all others: matrix products and
attention are surrounded by views, chains of elementwise operations have few. Of five pairs, the one closest to the
fitted rows of benchmarks/results/host_probe_h200.json."""

# Views in the layer that has nothing else (measure_host.py).
_NUM_VIEWS = 4
# kind of layer → number of its operations that autograd issues
_BACKWARD_OPS = {"linear": 3, "linear_without_bias": 2}
# operation → the kind of layer whose issue time it has
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
"""Operations whose issue time is measured as that of a layer, including its autograd node."""


def launches_of(rows: Rows, *, kernel_seconds: float, is_host: bool) -> dict[str, tuple[float, float]]:
    """Return operation → the CPU's seconds to issue it in forward and in backward.

    "node": per node of the autograd graph, one of which may issue several operations. Views are nodes that issue none;
    the backward of an addition is a node and one operation.

    If the CPU is the device, a kernel's time includes its issue, except what autograd and modules add.
    """
    layers = {row["role"]: row for row in rows if row["name"] == "dispatch"}
    if "add" not in layers:
        raise InvalidData("there is no dispatch among what was measured")
    call = (IN_A_STEP * layers["add"]["forward"], IN_A_STEP * layers["add"]["backward"])
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


_SECONDS = number(least=1e-12, most=1e3)
_BOTH_WAYS = record(forward=_SECONDS, backward=_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpeed:
    """One host, as measured by a process on it."""

    source: str = key(..., "the machine and the program that measured it", form=string)
    call_seconds: float = key(..., "a call of a Python function", form=_SECONDS)
    hook_seconds: float = key(..., "a call of a module with one hook before and one after its forward", form=_SECONDS)
    dispatch_seconds: Mapping[str, Mapping[str, float]] = key(
        ..., "kind of layer → time until its operations are issued", form=table(_BOTH_WAYS, needs=["add"])
    )
    share: float = key(1.0, "elapsed seconds per second on a core: above 1 on a shared core", least=1.0, most=1e6)
    memory: HostMemorySpeed | None = key(None, "its memory, as a GPU uses it", form=HOST_MEMORY_SPEED)

    def to_data(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def dispatch_rows(self) -> list[dict[str, Any]]:
        """The rows of `calibrate`, in wall seconds."""
        return [
            {"name": "dispatch", "role": kind} | {way: self.share * seconds for way, seconds in ways.items()}
            for kind, ways in self.dispatch_seconds.items()
        ]


def read_host_speed(data: object, *, where: str) -> HostSpeed:
    """Return the speed that a JSON or TOML table describes, which `where` names in errors."""
    try:
        found: HostSpeed = object_of(HostSpeed)(data, "")
    except WrongForm as error:
        raise InvalidData(f"{where}: is no speed of a host ({error})") from error
    return found


@cache
def reference_host() -> HostSpeed:
    """Return the host that the costs of engines were fitted on."""
    return read_host_speed(shipped_table("calibrated/host")["host"], where="calibrated/host.toml")


def engine_factor(host: HostSpeed, *, reference: HostSpeed) -> float:
    """Return the slowdown of an engine's calls relative to the reference: Python, hooks and small operations."""
    calls, hooks = host.call_seconds / reference.call_seconds, host.hook_seconds / reference.hook_seconds
    return geometric_mean((calls, hooks, dispatch_factor(host, reference=reference))) * host.share / reference.share


def dispatch_factor(host: HostSpeed, *, reference: HostSpeed) -> float:
    """Return the slowdown of issuing an operation relative to the reference: the median over common kinds of layers."""
    ours, theirs = host.dispatch_seconds, reference.dispatch_seconds
    return median(
        geometric_mean(ours[kind][way] / theirs[kind][way] for way in ("forward", "backward"))
        for kind in ours
        if kind in theirs
    )
