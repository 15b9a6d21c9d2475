"""A value with its source. Every number of the hardware tables is one."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from reprlib import repr as show
from typing import Any, Generic, TypeVar

from shardwise.base.files.form import Form, WrongForm, number, one_of, record_of, string, whole

KINDS = ("datasheet", "measured", "fitted")

Value = TypeVar("Value", int, float, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sourced(Generic[Value]):
    """`kind`: the maker's own figure, a value read or timed on a real device, or a fitted constant."""

    value: Value
    source: str
    kind: str


def _stated(value: str, path: str) -> str:
    if not value.strip():
        raise WrongForm(f"{path} is empty", advice=f"{path} = {show(value)}: must say where the value is from")
    return value


def _sourced(form: Form) -> Form:
    """The form of `{ value = …, source = "…", kind = "…" }`."""
    forms = {"value": form, "source": string.then(_stated), "kind": one_of(KINDS)}
    given = record_of(forms, needs=dict.fromkeys(forms, "a number is a value, its source and its kind"))
    return given.then(lambda values, path: Sourced(**values))


NAME = Form(words="a name", fits=lambda value: isinstance(value, str) and value != "")
SOURCED_COUNT = _sourced(whole(above=0))
SOURCED_NUMBER = _sourced(number(above=0))
SOURCED_NAME = _sourced(NAME)


@cache
def shipped_table(name: str) -> dict[str, dict[str, Any]]:
    """Return a table that comes with the package."""
    return tomllib.loads(files("shardwise.hardware").joinpath(f"{name}.toml").read_text(encoding="utf-8"))
