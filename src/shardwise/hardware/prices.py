"""Rental prices of devices (prices.toml)."""

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.errors import InvalidCluster
from shardwise.hardware.device import device_of
from shardwise.hardware.sourced import shipped_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """US dollars per GPU-hour, where it is from, and the day on which it was read ("" if the user gave it)."""

    per_gpu_hour: float
    source: str
    date: str


def prices(given: Iterable[str] = ()) -> dict[str, Price]:
    """Return the price of each kind of device; `given`: KIND=PRICE, which replaces or adds one."""
    table = shipped_table("prices")
    found = {
        kind: Price(per_gpu_hour=row["price"], source=row["source"], date=row["date"].isoformat())
        for kind, row in table.items()
    }
    for text in given:
        kind, _, price = text.partition("=")
        try:
            per_gpu_hour = float(price)
        except ValueError:
            per_gpu_hour = 0.0
        if not 0 < per_gpu_hour < 1e6:
            raise InvalidCluster(f"--price {text}: must be KIND=DOLLARS per GPU-hour, such as h100-80gb=2.5")
        found[device_of(kind.strip()).name] = Price(per_gpu_hour=per_gpu_hour, source="--price", date="")
    return found
