"""How fast a host is: what its CPU takes for the calls that issue a step. No torch here.

A small model's step takes as long as the CPU needs to issue it, so its time goes with the host and not with the device.
`HostSpeed` is what the host probe measures (measure_host.py). Engines' own costs were fitted on the host of
calibrated/host.toml, the reference; on another host they take `engine_factor` times as long.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from statistics import geometric_mean, median
from typing import Any

from shardwise.errors import InvalidData
from shardwise.files.json_form import WrongForm, number, record, table, text

_SECONDS = number(least=1e-12, most=1e3)
_PAIR = record(forward=_SECONDS, backward=_SECONDS)
_FORM = record(
    source=text,
    call_seconds=_SECONDS,
    hook_seconds=_SECONDS,
    dispatch_seconds=table(_PAIR),
    share=number(least=1.0, most=1e6),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpeed:
    """One host, as a process on it finds it.

    call_seconds       a call of a Python function
    hook_seconds       a call of a module that has a hook before and one after its forward
    dispatch_seconds   kind of layer → until its operations are issued, {"forward": …, "backward": …}
    share              seconds that pass for each second on a core: above 1 where others use the core as well
    """

    source: str
    call_seconds: float
    hook_seconds: float
    dispatch_seconds: Mapping[str, Mapping[str, float]]
    share: float = 1.0

    def to_data(self) -> dict[str, Any]:
        """What `read_host_speed` reads."""
        return asdict(self)

    @property
    def dispatch_rows(self) -> list[dict[str, Any]]:
        """As `calibrate` has them, with the time that others take of the core."""
        return [
            {"name": "dispatch", "role": kind} | {way: self.share * seconds for way, seconds in ways.items()}
            for kind, ways in self.dispatch_seconds.items()
        ]


def read_host_speed(data: object, *, where: str) -> HostSpeed:
    """The speed of a JSON or TOML table, which `where` names in errors."""
    try:
        _FORM(data, "")
    except WrongForm as error:
        raise InvalidData(f"{where}: is no speed of a host ({error})") from error
    assert isinstance(data, dict)
    if "add" not in data["dispatch_seconds"]:
        raise InvalidData(f"{where}: is no speed of a host (dispatch_seconds.add is missing)")
    return HostSpeed(**data)


@cache
def reference_host() -> HostSpeed:
    """The host that the engines' own costs were fitted on."""
    file = files("shardwise.hardware").joinpath("calibrated", "host.toml")
    return read_host_speed(tomllib.loads(file.read_text(encoding="utf-8"))["host"], where="calibrated/host.toml")


def engine_factor(host: HostSpeed, *, reference: HostSpeed) -> float:
    """How many times as long as on the reference an engine's own calls take: Python, hooks and small operations."""
    calls, hooks = host.call_seconds / reference.call_seconds, host.hook_seconds / reference.hook_seconds
    return geometric_mean((calls, hooks, dispatch_factor(host, reference=reference))) * host.share / reference.share


def dispatch_factor(host: HostSpeed, *, reference: HostSpeed) -> float:
    """How many times as long as on the reference it takes to issue an operation: the median of kinds that both have."""
    ours, theirs = host.dispatch_seconds, reference.dispatch_seconds
    return median(
        geometric_mean(ours[kind][way] / theirs[kind][way] for way in ("forward", "backward"))
        for kind in ours
        if kind in theirs
    )
