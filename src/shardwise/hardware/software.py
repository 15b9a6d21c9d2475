"""Generations of software: the speed of a year's kernels relative to those of the calibration."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from shardwise.errors import InvalidCluster, UnknownName
from shardwise.files.form import record_of, refusing, string, table
from shardwise.hardware.sourced import SOURCED_NUMBER, Sourced, shipped_table

CURRENT = "current"
MATMUL_PRECISIONS = ("highest", "high", "medium")
"""Arguments of torch.set_float32_matmul_precision: all but `highest` multiply fp32 values as TF32."""

_TABLES = ("matmul_reach", "fp32_matmul_reach", "attention_reach", "rms_norm_reach", "rms_norm_backward_reach")


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """One generation. `reaches`: table → architecture → speed relative to the calibration."""

    name: str
    title: str
    reaches: Mapping[str, Mapping[str, Sourced[float]]]

    def reach(self, table: str, *, architecture: str) -> float | None:
        """Return the relative speed; None if the generation has no value."""
        given = self.reaches.get(table, {})
        found = given.get(architecture, given.get("any"))
        return found.value if found is not None else None


@cache
def generations() -> Mapping[str, Software]:
    return {name: _read(name, table) for name, table in shipped_table("software").items()}


def software_of(name: object) -> Software:
    """Return a generation by name: 2023, 2024 or current."""
    found = generations().get(name) if isinstance(name, str) else None
    if found is None:
        raise UnknownName.of("software", str(name), known=generations())
    return found


def check_matmul_precision(value: object) -> None:
    if value not in MATMUL_PRECISIONS:
        raise InvalidCluster(f"matmul_precision = {value!r}: must be one of {', '.join(MATMUL_PRECISIONS)}")


_FORM = record_of({"title": string, **dict.fromkeys(_TABLES, table(SOURCED_NUMBER))}, needs={"title": ""})


def _read(name: str, given: object) -> Software:
    with refusing(InvalidCluster):
        values = _FORM(given, name)
    return Software(name=name, title=values.pop("title"), reaches=values)
