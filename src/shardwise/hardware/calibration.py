"""What was measured of a kind of device: how much of its peaks kernels reach, and what the CPU pays to issue them.

A table of TOML, which fit.py makes of what `calibrate` measured:

    source, kind          of every number in it
    kernel_seconds        the least time from one kernel to the next
    [reach]               kernel → the part that it reaches of the peak that bounds it (operations or bytes per second)
    [points]              kernel → [[log2 of its sizes …, measured / predicted], …], between which predictions are
                          corrected
    [launch_seconds]      operation → the CPU's time to issue it, [forward, backward]; `other` for those not named;
                          `call`: to have one done, whatever does it, by which the speeds of CPUs are compared
    [update]              optimizer → [seconds to issue, more for each tensor, bytes an element, the part of the peak]
    ranks_per_core        of CPUs: how many ranks share a core, which all times have in them (1 if it is left out)
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from shardwise.errors import InvalidCluster
from shardwise.hardware.sourced import KINDS, check_table

Points = tuple[tuple[tuple[float, ...], float], ...]
"""(log2 of sizes, measured / predicted), …"""

NUM_SIZES: Mapping[str, int] = MappingProxyType({"matmul": 4, "attention": 5, "convolution": 3})
"""Kernel → by how many sizes it is found among its points; all others by 2."""

_NUMBERS = ("kernel_seconds",)
_TABLES = ("reach", "points", "launch_seconds", "update")
# What stands for operations and optimizers that a table does not name.
_STANDS_FOR_OTHERS = {"launch_seconds": "other", "update": "adamw-fused"}
# Above any size, time and ratio; of larger ones the predictions would be no numbers.
_MOST = 1e18
_MOST_LOG2 = 128.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """The numbers of one calibration. Two are the same only if they are one: it is a key of caches."""

    source: str
    kind: str
    kernel_seconds: float
    reach: Mapping[str, float]
    points: Mapping[str, Points]
    launch_seconds: Mapping[str, tuple[float, float]]
    update: Mapping[str, tuple[float, float, float, float]]
    ranks_per_core: float = 1.0

    def as_table(self) -> dict[str, Any]:
        """What `read_calibration` reads."""
        return {
            "source": self.source,
            "kind": self.kind,
            "kernel_seconds": self.kernel_seconds,
            **({"ranks_per_core": self.ranks_per_core} if self.ranks_per_core != 1.0 else {}),
            "reach": dict(self.reach),
            "launch_seconds": {name: list(values) for name, values in self.launch_seconds.items()},
            "update": {name: list(values) for name, values in self.update.items()},
            "points": {name: [[*sizes, ratio] for sizes, ratio in points] for name, points in self.points.items()},
        }


def read_calibration(table: object, *, key: str) -> Calibration:
    """The calibration of a TOML table, which `key` names in errors."""
    given = check_table(key, table, allowed=("source", "kind", "ranks_per_core", *_NUMBERS, *_TABLES))
    for name in ("source", "kind", *_NUMBERS, *_TABLES):
        if name not in given:
            raise InvalidCluster(f"{key}.{name} is missing: `shardwise calibrate` writes it")
    if given["kind"] not in KINDS:
        raise InvalidCluster(f"{key}.kind = {given['kind']!r}: must be one of {', '.join(KINDS)}")
    reach, points, launch_seconds, update = (_table(f"{key}.{name}", given[name]) for name in _TABLES)
    for name, needed in _STANDS_FOR_OTHERS.items():
        if needed not in given[name]:
            raise InvalidCluster(f"{key}.{name}.{needed} is missing: `shardwise calibrate` writes it")
    return Calibration(
        source=str(given["source"]),
        kind=given["kind"],
        kernel_seconds=_numbers(f"{key}.kernel_seconds", [given["kernel_seconds"]], count=1)[0],
        reach={name: _above_0(f"{key}.reach.{name}", value) for name, value in reach.items()},
        points={name: _points(f"{key}.points.{name}", rows, kernel=name) for name, rows in points.items()},
        launch_seconds={name: _pair(f"{key}.launch_seconds.{name}", values) for name, values in launch_seconds.items()},
        update={name: _four(f"{key}.update.{name}", values) for name, values in update.items()},
        ranks_per_core=_above_0(f"{key}.ranks_per_core", given.get("ranks_per_core", 1.0)),
    )


@cache
def shipped_calibration(name: str) -> Calibration | None:
    """The calibration of a device of the package, if it has one: calibrated/NAME.toml."""
    file = files("shardwise.hardware").joinpath("calibrated", f"{name}.toml")
    if not file.is_file():
        return None
    return read_calibration(tomllib.loads(file.read_text(encoding="utf-8"))["calibration"], key=name)


def _table(key: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidCluster(f"{key} = {value!r}: must be a table")
    return value


def _points(key: str, rows: object, *, kernel: str) -> Points:
    """Rows of as many sizes as the kernel is found by, and a ratio."""
    if not isinstance(rows, list):
        raise InvalidCluster(f"{key} = {rows!r}: must be a list of rows")
    count = NUM_SIZES.get(kernel.split()[0].removesuffix("_backward"), 2) + 1
    found = [_numbers(key, row, count=count) for row in rows]
    for *sizes, _ in found:
        if max(sizes) > _MOST_LOG2:
            raise InvalidCluster(f"{key} = {max(sizes):g}: must be the log2 of a size, at most {_MOST_LOG2:g}")
    return tuple((tuple(sizes), _above_0(key, ratio)) for *sizes, ratio in found)


def _pair(key: str, values: object) -> tuple[float, float]:
    forward, backward = _numbers(key, values, count=2)
    return forward, backward


def _four(key: str, values: object) -> tuple[float, float, float, float]:
    issue, more, num_bytes, reach = _numbers(key, values, count=4)
    return issue, more, num_bytes, _above_0(key, reach)


def _above_0(key: str, value: object) -> float:
    (number,) = _numbers(key, [value], count=1)
    if number == 0:
        raise InvalidCluster(f"{key} = {number}: must be above 0")
    return number


def _numbers(key: str, value: object, *, count: int) -> list[float]:
    """So many finite numbers that are not negative."""
    if not isinstance(value, list) or len(value) != count:
        raise InvalidCluster(f"{key} = {value!r}: must be {count} numbers")
    for number in value:
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= _MOST:
            raise InvalidCluster(f"{key} = {number!r}: must be a number that is not below 0, at most {_MOST:g}")
    return [float(number) for number in value]
