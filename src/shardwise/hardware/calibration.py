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
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from shardwise.errors import InvalidCluster
from shardwise.files.form import Form, anything, each, inside, number, one_of, record_of, refusing, row, string, table
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
