"""Reads the values of another tool's settings, each as what it has to be."""

import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

Choice = TypeVar("Choice")
_SWITCHES = dict.fromkeys(("true", "yes", "y", "on", "t", "1"), True) | dict.fromkeys(
    ("false", "no", "n", "off", "f", "0"), False
)
_MOST = 2**63 - 1
_MOST_SIGNS = 60
# Stands for a table that has values.
_TABLE: Mapping[str, Any] = {}


class Settings:
    """The settings of a file by flattened names (`fsdp_config.fsdp_version`), with typed access.

    What the file leaves out, null and `"auto"` are the tool's to decide, and give the default. So does a value that the
    tool cannot take, which is noted in `wrong`.

    values   the settings as they are
    wrong    name → (what it is, what to write instead)
    """

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.values = _flatten(table)
        self.wrong: dict[str, tuple[str, str]] = {}

    def has(self, name: str) -> bool:
        """Return whether a setting is given: a value that is not empty, or a table."""
        return bool(self.values.get(name)) or any(other.startswith(f"{name}.") for other in self.values)

    def switch(self, name: str, *, default: bool = False) -> bool:
        """Return the value of a switch, which these files write as true, "true", 1 or "yes"."""
        value = self._given(name)
        if value is None:
            return default
        found = _SWITCHES.get(str(value).strip().lower()) if isinstance(value, str | int) else None
        return self.refuse(name, must="true or false", default=default) if found is None else found

    def count(self, name: str, *, default: int = 1) -> int:
        """Return an integer of at least 1."""
        value = self._given(name)
        if value is None:
            return default
        if type(value) is not int or not 1 <= value <= _MOST:
            return self.refuse(name, must="an integer of at least 1", default=default)
        return value

    def number(self, name: str) -> float:
        value = self._given(name)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return self.refuse(name, must="a number", default=0.0)
        return value

    def one_of(self, name: str, choices: Mapping[Any, Choice], *, default: Choice) -> Choice:
        """Return the choice that the value names: an integer as it is, a word or a switch in capitals."""
        value = self._given(name)
        if value is None:
            return default
        key = str(value).strip().upper() if isinstance(value, str | bool) else value
        if isinstance(key, str | int) and key in choices:
            return choices[key]
        shown = [*dict.fromkeys(str(choice) for choice in choices)]
        return self.refuse(name, must=" or ".join((", ".join(shown[:-1]), shown[-1])), default=default)

    def text(self, name: str, *, default: str) -> str:
        value = self._given(name)
        if value is None:
            return default
        return value if isinstance(value, str) else self.refuse(name, must="a word", default=default)

    def class_names(self, name: str) -> tuple[str, ...]:
        """Return class names that are given as a list or separated by commas."""
        value = self._given(name)
        parts = value.split(",") if isinstance(value, str) else [] if value is None else value
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
            return self.refuse(name, must="names of classes", default=())
        return tuple(named for part in parts if (named := part.strip().rpartition(".")[2]).isidentifier())

    def _given(self, name: str) -> Any:
        """Return the value; None if the tool decides. Where a table must be and is none, that is noted."""
        parts = name.split(".")
        for outer in (".".join(parts[:end]) for end in range(1, len(parts))):
            if not isinstance(self.values.get(outer), Mapping | None):
                self.refuse(outer, must="a table", default=None)
        value = self.values.get(name)
        if value is None and self.has(name):
            return _TABLE
        return None if isinstance(value, str) and value.strip().lower() == "auto" else value

    def refuse(self, name: str, *, must: str, default: Choice) -> Choice:
        """Note a value that the tool cannot take, and return the default."""
        self.wrong[name] = (f"{name} is {_shown(self.values.get(name, _TABLE))}", f"write {must}")
        return default


def _flatten(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by names with dots; an empty table is a value."""
    found: dict[str, Any] = {}
    waiting = [("", table)]
    while waiting:
        prefix, inner = waiting.pop()
        for key, value in inner.items():
            if isinstance(value, Mapping) and value:
                waiting.append((f"{prefix}{key}.", value))
            else:
                found[f"{prefix}{key}"] = value
    return found


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple | set):
        return "a list"
    if isinstance(value, int) and abs(value) > _MOST:
        # Python refuses to write a very long one.
        return "an integer of more than 64 bits"
    text = json.dumps(value, default=str)
    return (text if len(text) <= _MOST_SIGNS else f"{text[:_MOST_SIGNS]}…") + " (a string)" * isinstance(value, str)
