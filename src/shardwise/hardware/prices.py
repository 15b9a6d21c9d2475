"""Rental prices of devices, and the host memory that comes with them (prices.toml)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from shardwise.base.errors import InvalidCluster
from shardwise.hardware.device import device_of
from shardwise.hardware.sourced import SOURCED_COUNT, shipped_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """US dollars per GPU-hour, where it is from, and the day on which it was read ("" if the user gave it).

    host_bytes   memory of the machine per GPU; 0 if it is not known
    """

    per_gpu_hour: float
    source: str
    date: str
    host_bytes: int = 0


def prices(given: Iterable[str] = (), *, host_bytes: int | None = None) -> dict[str, Price]:
    """Return the price of each kind of device.

    `given`: KIND=PRICE, which replaces or adds one. `host_bytes`: per GPU of every kind, instead of those listed.
    """
    found = {kind: _listed(kind, row) for kind, row in shipped_table("prices").items()}
    for text in given:
        kind, _, price = text.partition("=")
        try:
            per_gpu_hour = float(price)
        except ValueError:
            per_gpu_hour = 0.0
        if not 0 < per_gpu_hour < 1e6:
            raise InvalidCluster(f"--price {text}: must be KIND=DOLLARS per GPU-hour, such as h100-80gb=2.5")
        name = device_of(kind.strip()).name
        host = found[name].host_bytes if name in found else 0
        found[name] = Price(per_gpu_hour=per_gpu_hour, source="--price", date="", host_bytes=host)
    return found if host_bytes is None else {kind: replace(one, host_bytes=host_bytes) for kind, one in found.items()}


def _listed(kind: str, row: dict[str, Any]) -> Price:
    host = SOURCED_COUNT(row["host_gib"], f"{kind}.host_gib").value if "host_gib" in row else 0
    return Price(per_gpu_hour=row["price"], source=row["source"], date=row["date"].isoformat(), host_bytes=host * 2**30)
