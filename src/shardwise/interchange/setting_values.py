"""Reads the values of another tool's settings."""

from collections.abc import Mapping
from typing import Any


def flatten(table: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested tables into one whose keys have dots."""
    found: dict[str, Any] = {}
    waiting = [("", table)]
    while waiting:
        prefix, inner = waiting.pop()
        for key, value in inner.items():
            if isinstance(value, Mapping):
                waiting.append((f"{prefix}{key}.", value))
            else:
                found[f"{prefix}{key}"] = value
    return found


def as_bool(value: object) -> bool:
    """Return the value of a switch, which these files write as true, "true", 1 or "yes"."""
    return value.strip().lower() in ("true", "yes", "1", "y") if isinstance(value, str) else bool(value)


def as_count(value: object, *, default: int = 1) -> int:
    """Return an integer of at least 1; the default for `"auto"`, null and anything else."""
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else default


def class_names(value: object) -> tuple[str, ...]:
    """Return class names that are given as a list or separated by commas."""
    if isinstance(value, str):
        value = value.split(",")
    parts = value if isinstance(value, list | tuple) else []
    return tuple(name for part in parts if (name := str(part).strip().rpartition(".")[2]).isidentifier())
