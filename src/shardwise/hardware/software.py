"""Generations of software: how fast kernels of a year are relative to those that the calibration was measured with."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from shardwise.errors import InvalidCluster, UnknownName
from shardwise.hardware.sourced import Sourced, check_table, read_sourced, shipped_table

CURRENT = "current"
MATMUL_PRECISIONS = ("highest", "high", "medium")
"""What torch.set_float32_matmul_precision takes: anything but `highest` multiplies fp32 values as TF32."""

_TABLES = ("matmul_reach", "fp32_matmul_reach", "attention_reach", "rms_norm_reach", "rms_norm_backward_reach")


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """One generation. `reaches`: table → architecture → how fast, relative to the calibration."""

    name: str
    title: str
    reaches: Mapping[str, Mapping[str, Sourced[float]]]

    def reach(self, table: str, *, architecture: str) -> float | None:
        """None where the generation says nothing of it."""
        given = self.reaches.get(table, {})
        found = given.get(architecture, given.get("any"))
        return found.value if found is not None else None


@cache
def generations() -> Mapping[str, Software]:
    """All generations, by name."""
    return {name: _read(name, table) for name, table in shipped_table("software").items()}


def software_of(name: object) -> Software:
    """The generation of a name: 2023, 2024 or current."""
    found = generations().get(name) if isinstance(name, str) else None
    if found is None:
        raise UnknownName.of("software", str(name), known=generations())
    return found


def check_matmul_precision(value: object) -> None:
    if value not in MATMUL_PRECISIONS:
        raise InvalidCluster(f"matmul_precision = {value!r}: must be one of {', '.join(MATMUL_PRECISIONS)}")


def _read(name: str, table: object) -> Software:
    given = check_table(name, table, allowed=("title", *_TABLES))
    reaches = {
        key: {
            architecture: read_sourced(f"{name}.{key}.{architecture}", number, of=float)
            for architecture, number in given[key].items()
        }
        for key in _TABLES
        if key in given
    }
    return Software(name=name, title=given["title"], reaches=reaches)
