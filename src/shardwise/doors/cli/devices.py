"""`shardwise devices`: the hardware tables, with the source of each number."""

import dataclasses
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from shardwise.base.vocabulary.quantities import GIB, significant
from shardwise.doors.cli.shared_options import AsJson
from shardwise.hardware.calibration import shipped_calibration
from shardwise.hardware.device import Device, Link, device_of, links
from shardwise.hardware.device import devices as all_devices
from shardwise.hardware.sourced import Sourced
from shardwise.measure.report.text.plain_table import plain_table

if TYPE_CHECKING:
    from rich.table import Table

_LEAST_WIDTH = 80


def devices(
    name: Annotated[str | None, Argument(help="One device or link, with the source of each number.")] = None,
    as_json: AsJson = False,
) -> None:
    """List devices and links; for one, every number with its source."""
    if name is not None:
        found = links()[name] if name in links() else device_of(name)
        if as_json:
            print(json.dumps(_as_data(found), indent=2, ensure_ascii=False))
        else:
            also = f" (also {', '.join(found.aliases)})" if isinstance(found, Device) and found.aliases else ""
            print(f"{found.name}: {found.title}{also}")
            _print(_number_table(found))
    elif as_json:
        rows = {
            "devices": {key: _as_data(device) for key, device in all_devices().items()},
            "links": {key: _as_data(link) for key, link in links().items()},
        }
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        _print(_device_table(all_devices().values()))
        print()
        _print(_link_table(links().values()))


def _as_data(row: Device | Link) -> dict[str, Any]:
    """Return the fields that are known."""
    return {key: value for key, value in dataclasses.asdict(row).items() if value is not None}


def _device_table(rows: Iterable[Device]) -> "Table":
    numbers = (GIB.name, "fp32", "tf32", "bf16", "fp16 TFLOP/s", "memory GB/s")
    # Names are typed into commands: they are never cut. With one space between columns the table has 78 characters.
    table = plain_table(("device", *numbers, "link", "host link"), right=numbers, wraps=numbers, gap=1)
    for device in rows:
        peaks = [_scaled(device.flops_per_s(dtype), unit=1e12) for dtype in ("fp32", "tf32", "bf16", "fp16")]
        table.add_row(
            device.name,
            _scaled(device.capacity_bytes, unit=GIB.size),
            *peaks,
            _scaled(device.memory_bytes_per_s, unit=1e9),
            device.link.value if device.link else "–",
            device.host_link.value if device.host_link else "–",
        )
    return table


def _link_table(rows: Iterable[Link]) -> "Table":
    numbers = ("GB/s per direction", "latency µs")
    table = plain_table(("link", *numbers, "what"), right=numbers, wraps=(*numbers, "what"))
    for link in rows:
        bandwidth, latency = _scaled(link.bytes_per_s, unit=1e9), _scaled(link.latency_seconds, unit=1e-6)
        table.add_row(link.name, bandwidth, latency, link.title)
    return table


def _number_table(row: Device | Link) -> "Table":
    table = plain_table(("number", "value", "kind", "source"), right=("value",), wraps=("kind", "source"))
    table.columns[-1].overflow = "fold"
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if isinstance(value, Sourced):
            table.add_row(field.name, _number(value.value), value.kind, value.source)
        elif value is None and field.name != "calibration":
            table.add_row(field.name, "–", "unknown", "")
    if isinstance(row, Device):
        found = row.calibration or shipped_calibration(row.name)
        points = sum(map(len, found.points.values())) if found else 0
        kind, source = (found.kind, found.source) if found else ("unknown", "shardwise calibrate measures it")
        table.add_row("calibration", f"{points} points" if found else "–", kind, source)
    return table


def _number(value: float | str) -> str:
    """Format integers in full, and rates and times with four digits."""
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _scaled(number: Sourced[Any] | None, *, unit: float) -> str:
    """Format a number in its unit with four digits; a dash if it is unknown."""
    return "–" if number is None else significant(number.value / unit, num_digits=4)


def _print(table: "Table") -> None:
    """Print a table; in a terminal that is too narrow for its names and numbers, lines are wrapped instead of cut."""
    from rich.console import Console

    Console(width=max(Console().width, _LEAST_WIDTH)).print(table)
