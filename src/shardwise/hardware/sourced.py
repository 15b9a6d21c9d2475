"""A value that says where it is from. Every number of the hardware tables is one."""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import isfinite
from reprlib import repr as _show
from typing import Any, Generic, TypeVar

from shardwise.errors import InvalidCluster, UnknownName

KINDS = ("datasheet", "measured", "fitted")

Value = TypeVar("Value", int, float, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sourced(Generic[Value]):
    """`kind`: the maker's own figure, something read or timed on a real device, or a fitted constant."""

    value: Value
    source: str
    kind: str


def read_sourced(key: str, table: object, *, of: type[Value]) -> Sourced[Value]:
    """The value of `{ value = …, source = "…", kind = "…" }`, which `key` names in errors."""
    fields = check_table(key, table, allowed=("value", "source", "kind"))
    for name in ("value", "source", "kind"):
        if name not in fields:
            raise InvalidCluster(f"{key}.{name} is missing: a number is a value, its source and its kind")
    source, kind = fields["source"], fields["kind"]
    if not isinstance(source, str) or not source.strip():
        raise InvalidCluster(f"{key}.source = {_show(source)}: must say where the value is from")
    if kind not in KINDS:
        raise InvalidCluster(f"{key}.kind = {_show(kind)}: must be one of {', '.join(KINDS)}")
    return Sourced(value=_checked(f"{key}.value", fields["value"], of=of), source=source, kind=kind)


def check_table(key: str, value: object, *, allowed: Iterable[str]) -> dict[str, Any]:
    """A TOML table whose keys are all known."""
    if not isinstance(value, dict):
        raise InvalidCluster(f"{key} = {_show(value)}: must be a table")
    known = tuple(allowed)
    for name in value:
        if name not in known:
            raise InvalidCluster(f"{key}: {UnknownName.of('key', name, known=known)}")
    return value


def _checked(key: str, value: Any, *, of: type[Any]) -> Any:
    if of is str:
        if not isinstance(value, str) or not value:
            raise InvalidCluster(f"{key} = {_show(value)}: must be a name")
        return value
    accepted = (int,) if of is int else (int, float)
    # A bool is an int to Python; TOML also has inf and nan.
    if not isinstance(value, accepted) or isinstance(value, bool) or not isfinite(value) or value <= 0:
        raise InvalidCluster(f"{key} = {_show(value)}: must be a {'whole ' if of is int else ''}number above 0")
    return of(value)


@cache
def shipped_table(name: str) -> dict[str, dict[str, Any]]:
    """A table that comes with the package."""
    return tomllib.loads(files("shardwise.hardware").joinpath(f"{name}.toml").read_text(encoding="utf-8"))
