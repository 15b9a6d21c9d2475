"""Formats of bytes, seconds, rates and errors: units and rules for digits.

in a sentence or on a chart   bytes_text, seconds_text, significant, scientific, error_text
in a column of one unit       byte_unit or table_unit for its head; fixed, digits_in, table_number for its cells
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardwise.base.errors import InvalidPlan


class UnitOfMeasure(NamedTuple):
    """`size` is in bytes or in seconds."""

    size: float
    name: str


_B = UnitOfMeasure(1, "B")
KIB = UnitOfMeasure(2**10, "KiB")
MIB = UnitOfMeasure(2**20, "MiB")
GIB = UnitOfMeasure(2**30, "GiB")
TIB = UnitOfMeasure(2**40, "TiB")
SIZE_EXAMPLE = "60GiB"
"""An example of a size as a user may write it (`byte_count`)."""
_BYTE_UNITS = (_B, KIB, MIB, GIB, TIB)
_SECOND_UNITS = (UnitOfMeasure(1e-6, "µs"), UnitOfMeasure(1e-3, "ms"), UnitOfMeasure(1.0, "s"))
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
# Below this many GiB, a table with two places would leave too few digits of its small sizes.
_TABLE_GIB = 8


def byte_unit(largest: float, *, at_least: float = 1, among: Sequence[UnitOfMeasure] = _BYTE_UNITS) -> UnitOfMeasure:
    """Return the largest unit (`among` ascends) of which `largest` bytes are at least `at_least`; else the first."""
    return _unit(largest, at_least=at_least, among=among)


def table_unit(sizes: Iterable[int]) -> UnitOfMeasure:
    """Return the unit of a table of sizes with two places: MiB, or GiB where one size is large."""
    return _unit(max(sizes, default=0), at_least=_TABLE_GIB, among=(MIB, GIB))


def second_unit(largest: float) -> UnitOfMeasure:
    """Return the largest unit of which `largest` is at least one."""
    return _unit(largest, at_least=1, among=_SECOND_UNITS)


def _unit(largest: float, *, at_least: float, among: Sequence[UnitOfMeasure]) -> UnitOfMeasure:
    return next((unit for unit in reversed(among) if largest >= at_least * unit.size), among[0])


def bytes_text(num_bytes: float) -> str:
    """Format with three digits, in the unit that suits the size: `8.60 GiB`."""
    unit = byte_unit(num_bytes)
    return f"{digits(num_bytes / unit.size)} {unit.name}"


def byte_count(text: str, *, key: str) -> int:
    """Return the bytes of `60GiB` or `512MiB`; any other text raises an error that names its key."""
    found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([a-zA-Z]+)", text.strip())
    units = {unit.name.lower(): unit.size for unit in _BYTE_UNITS}
    if found is None or found[2].lower() not in units or not float(found[1]):
        raise InvalidPlan(f"{key} = {text!r}: must be a size, such as {SIZE_EXAMPLE}")
    return round(float(found[1]) * units[found[2].lower()])


def seconds_text(seconds: float) -> str:
    """Format with three digits, in the unit that suits the time: `12.3 ms`."""
    if not seconds:
        return "0 s"
    unit = second_unit(seconds)
    return f"{digits(seconds / unit.size)} {unit.name}"


def step_seconds_text(seconds: float) -> str:
    """Format the time of a step in seconds, without the unit: three places, or one from 10 s on."""
    return f"{seconds:.3f}" if seconds < 10 else f"{seconds:.1f}"


def fixed(num_bytes: float, *, unit: UnitOfMeasure, places: int = 1) -> str:
    """Format in a given unit, without its name: `79.2`."""
    return f"{num_bytes / unit.size:.{places}f}"


def fixed_text(num_bytes: float, *, unit: UnitOfMeasure, places: int = 1) -> str:
    """Format in a given unit: `79.2 GiB`."""
    return f"{fixed(num_bytes, unit=unit, places=places)} {unit.name}"


def digits(value: float) -> str:
    """Format with three digits (two below 1), and all digits before the point: `0.43`, `9.25`, `12.3`, `12,346`."""
    size = abs(value)
    if size >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 0.1 else f"{value:.3g}"


def digits_in(num_bytes: float, *, unit: UnitOfMeasure) -> str:
    """Format like `digits` for a column of one unit, where all sizes too small for the unit look the same."""
    value = num_bytes / unit.size
    return "< 0.01" if 0 < value < 0.01 else digits(value)


def table_number(value: float) -> str:
    """Format with two places, or fewer after three or four digits before the point: `17.58`, `648.9`, `1234`."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def table_rate(value: float) -> str:
    """Format with three digits, from a million on in millions: `3,782`, `1.23M`."""
    return f"{value / 1e6:.2f}M" if value >= 1e6 else digits(value)


def significant(value: float, *, num_digits: int = 3) -> str:
    """Format with at most `num_digits` digits and no zeros at the end: `8`, `0.0138`, but `12,346`."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (num_digits - 1) else f"{value:.{num_digits}g}"


def scientific(value: float) -> str:
    """Format with two digits; far from 1 with a power of ten: `2.4 × 10⁻⁷`."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.2g}"
    number, _, power = f"{value:.1e}".partition("e")
    return f"{number} × 10{str(int(power)).translate(_RAISED)}"


def error_text(error: float | None, *, unknown: str = "not measured") -> str:
    """Format the error of a prediction: `+1.2%`. An error that rounds to zero is `+0.0%`."""
    return unknown if error is None else f"{error:+.1%}".replace("-0.0%", "+0.0%")
