"""`shardwise devices`: the hardware tables, and where each number is from."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from shardwise.hardware.calibration import shipped_calibration
from shardwise.hardware.device import Device, device_of
from shardwise.hardware.device import devices as all_devices
from shardwise.hardware.link import Link, links
from shardwise.hardware.sourced import Sourced
from shardwise.vocabulary.quantities import GIB, significant


def devices(
    name: Annotated[str | None, typer.Argument(help="One device or link, with the source of each number.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """List devices and links; for one, every number with its source."""
    if name is not None:
        found = links()[name] if name in links() else device_of(name)
        if as_json:
            print(json.dumps(_as_data(found), indent=2, ensure_ascii=False))
        else:
            _show_one(found)
    elif as_json:
        rows = {
            "devices": {key: _as_data(device) for key, device in all_devices().items()},
            "links": {key: _as_data(link) for key, link in links().items()},
        }
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        _show_devices(all_devices().values())
        print()
        _show_links(links().values())


def _as_data(row: Device | Link) -> dict[str, Any]:
    """The known fields."""
    return {key: value for key, value in dataclasses.asdict(row).items() if value is not None}


def _show_devices(rows: Iterable[Device]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("device", no_wrap=True)
    for column in (GIB.name, "fp32", "tf32", "bf16", "fp16 TFLOP/s", "memory GB/s"):
        table.add_column(column, justify="right")
    table.add_column("link")
    table.add_column("host link")
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
    _print(table)


def _show_links(rows: Iterable[Link]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("link", no_wrap=True)
    table.add_column("GB/s a direction", justify="right")
    table.add_column("latency µs", justify="right")
    table.add_column("what")
    for link in rows:
        bandwidth, latency = _scaled(link.bytes_per_s, unit=1e9), _scaled(link.latency_seconds, unit=1e-6)
        table.add_row(link.name, bandwidth, latency, link.title)
    _print(table)


def _show_one(row: Device | Link) -> None:
    from rich.table import Table

    also = f" (also {', '.join(row.aliases)})" if isinstance(row, Device) and row.aliases else ""
    print(f"{row.name}: {row.title}{also}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("number", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("kind")
    table.add_column("source", overflow="fold")
    for field in dataclasses.fields(row):
        value = getattr(row, field.name)
        if isinstance(value, Sourced):
            table.add_row(field.name, _plain(value.value), value.kind, value.source)
        elif value is None and field.name != "calibration":
            table.add_row(field.name, "–", "unknown", "")
    if isinstance(row, Device):
        found = row.calibration or shipped_calibration(row.name)
        points = sum(map(len, found.points.values())) if found else 0
        kind, source = (found.kind, found.source) if found else ("unknown", "shardwise calibrate measures it")
        table.add_row("calibration", f"{points} points" if found else "–", kind, source)
    _print(table)


def _plain(value: float | str) -> str:
    """Integers in full; rates and times with four digits."""
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _scaled(number: Sourced[Any] | None, *, unit: float) -> str:
    """In its unit, with four digits; a dash where it is not known."""
    if number is None:
        return "–"
    return significant(number.value / unit, num_digits=4)


def _print(table: object) -> None:
    from rich.console import Console

    Console().print(table)
