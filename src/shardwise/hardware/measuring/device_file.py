"""The file that `shardwise calibrate` writes: a cluster file of this machine.

    devices_per_node = 4        # the ranks that measured

    [device]                    # as in a cluster file
    name = "h200"
    like = "h200"               # the source of all values that were not measured
    context_bytes = { value = …, source = "…", kind = "measured" }
    [device.calibration]        # calibration.py
    …
    [link]                      # where collectives were measured
    …

It can be used as a cluster (`--cluster FILE.toml`), or its device in another cluster (`--devices FILE.toml`).
"""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardwise.base.errors import InvalidData
from shardwise.base.files.atomic import atomic_write
from shardwise.hardware.device import Device, device_of, devices
from shardwise.hardware.measuring.fit import fit_calibration, fit_link, measured_peaks, shared
from shardwise.hardware.sourced import Sourced

_MEASURED = ("capacity_bytes", "context_bytes", "num_processors")


def device_table(
    measured: Mapping[str, Any], *, like: str | None = None, link_rows: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return the contents of the file. `link_rows`: collectives from another source than `measured`."""
    try:
        return _device_table(measured, like=like, link_rows=link_rows)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise InvalidData(f"these are no measurements of this version's `shardwise calibrate` ({what})") from error


def _device_table(
    measured: Mapping[str, Any], *, like: str | None, link_rows: list[dict[str, Any]] | None
) -> dict[str, Any]:
    source = f"shardwise calibrate, torch {measured['torch']}, {measured['title']}"
    base = device_of(like) if like is not None else device_like(measured["title"], kind=measured["device"])
    own = {
        name: Sourced(value=measured[name], source=source, kind="measured")
        for name in _MEASURED
        if measured.get(name) is not None
    }
    if base.memory_bytes_per_s is None:
        own |= measured_peaks(shared(measured), source=source)
    device = replace(base, **own)  # type: ignore[arg-type]
    if device.memory_bytes_per_s is None or device.fp32_flops_per_s is None:
        raise InvalidData("too little was measured for a table: give it more time (--limit-seconds)")
    calibration = fit_calibration(measured, device=device, source=source)
    collectives = link_rows if link_rows is not None else measured["rows"]
    link = fit_link(collectives, source=source if link_rows is None else "nccl-tests")
    num_ranks = max((row.get("num_ranks", 1) for row in collectives), default=1)
    named = {"name": base.name, "like": base.name} if base.name in devices() else {"name": base.name}
    table: dict[str, Any] = {"devices_per_node": num_ranks, "device": named}
    for name, number in own.items():
        table["device"][name] = {"value": number.value, "source": number.source, "kind": number.kind}
    table["device"]["calibration"] = calibration.as_table()
    return table | ({"link": link} if link is not None else {})


def device_like(title: str, *, kind: str) -> Device:
    """Return the known device whose name is in the driver's title, such as `h100-80gb` in `NVIDIA H100 80GB HBM3`.

    If there is none, return a new device without any values.
    """
    if kind == "cpu":
        return device_of("cpu")
    words = set(re.findall(r"[a-z0-9]+", title.lower().replace("geforce ", "")))
    fitting = [device for device in devices().values() if device.name != "cpu" and _words(device) <= words]
    if not fitting:
        return Device(name="-".join(re.findall(r"[a-z0-9]+", title.lower())) or "custom", title=title)
    return max(fitting, key=lambda device: len(_words(device)))


def _words(device: Device) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", device.name))


def write_table(table: Mapping[str, Any], path: str | os.PathLike[str], *, by: str = "shardwise calibrate") -> None:
    """Write the file with one line per row of numbers."""
    lines = [f"# Written by `{by}`; docs/hardware.md says how it is used.", *_lines(table)]
    text = "\n".join(lines) + "\n"
    # Fail before the file is replaced, not when it is read.
    tomllib.loads(text)
    with atomic_write(path) as file:
        file.write(text.encode())


def _lines(table: Mapping[str, Any], *, name: str = "") -> Iterator[str]:
    """Yield the values of a TOML table, then its sub-tables."""
    for key, value in table.items():
        if not _is_table(value):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        if _is_table(value):
            path = f"{name}.{_key(key)}" if name else _key(key)
            yield from ("", f"[{path}]", *_lines(value, name=path))


def _is_table(value: object) -> bool:
    """Return whether a value is a sub-table; a number with its source stays on one line."""
    return isinstance(value, dict) and "value" not in value


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + "".join(f"    {_value(row)},\n" for row in value) + "]"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        # No measurement has more than five significant digits.
        return f"{value:.5g}" if not float(f"{value:.5g}").is_integer() else f"{float(f'{value:.5g}')}"
    return json.dumps(value, ensure_ascii=False)
