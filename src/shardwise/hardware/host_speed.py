"""The speed of a host: the time its CPU takes for the calls that issue a step. No torch here.

A small model's step takes as long as the CPU needs to issue it, so its time depends on the host, not on the device.
The host probe measures a `HostSpeed` (probe_host.py). The costs of engines were fitted on the reference host of
calibrated/host.toml; on another host they take `engine_factor` times as long.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from statistics import geometric_mean, median
from typing import Any

from shardwise.errors import InvalidData
from shardwise.files.form import WrongForm, number, record, string, table
from shardwise.files.keys import key, object_of
from shardwise.hardware.host_memory_speed import HOST_MEMORY_SPEED, HostMemorySpeed
from shardwise.hardware.sourced import shipped_table

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
