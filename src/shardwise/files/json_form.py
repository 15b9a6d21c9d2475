"""The form that a JSON value must have: checked once where a file is read, so that who uses it can trust it.

A form is a function of (value, path) that raises `WrongForm`; forms are put together from smaller ones:

    record(name=text, sizes=each(whole()), limit=optional(number()))
"""

import sys
from collections.abc import Callable, Collection
from typing import Any

from shardwise.errors import ShardwiseError

Form = Callable[[Any, str], None]


class WrongForm(ShardwiseError):  # noqa: N818
    """A value that is not of the form that it must have; whoever read the file adds its name."""


def text(value: Any, path: str) -> None:
    """Any string."""
    if not isinstance(value, str):
        raise _wrong(value, path, expected="a string")


def anything(value: Any, path: str) -> None:
    """What is only shown."""


def whole(*, least: int = 0, most: int = 2**62) -> Form:
    """A whole number in a range."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise _wrong(value, path, expected=f"a whole number from {least} to {most}")

    return check


def number(*, least: float = 0.0, most: float = 1e18) -> Form:
    """A number in a range."""

    def check(value: Any, path: str) -> None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:
            raise _wrong(value, path, expected=f"a number from {least:g} to {most:g}")

    return check


def any_number(value: Any, path: str) -> None:
    """Any number; one that JSON does not have is a string: "nan", "inf", "-inf"."""
    if value in ("nan", "inf", "-inf"):
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:
        raise _wrong(value, path, expected="a number")


def optional(form: Form) -> Form:
    """The form, or null."""

    def check(value: Any, path: str) -> None:
        if value is not None:
            form(value, path)

    return check


def each(form: Form, *, least: int = 0) -> Form:
    """A list of values that all have the form."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, list) or len(value) < least:
            raise _wrong(value, path, expected=f"a list of at least {least}" if least else "a list")
        for index, item in enumerate(value):
            form(item, f"{path}[{index}]")

    return check


def row(*forms: Form) -> Form:
    """A list with one value per form."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, list) or len(value) != len(forms):
            raise _wrong(value, path, expected=f"a list of {len(forms)}")
        for index, (form, item) in enumerate(zip(forms, value, strict=True)):
            form(item, f"{path}[{index}]")

    return check


def table(form: Form, *, keys: Collection[str] | None = None) -> Form:
    """An object whose values all have the form; with `keys`, no others are admitted."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(value, path, expected="an object")
        for name, item in value.items():
            if keys is not None and name not in keys:
                raise WrongForm(f"{path} has {_short(name)}, which is none of {', '.join(keys)}")
            form(item, _inside(path, name))

    return check


def record(*, others: bool = False, may_lack: Collection[str] = (), **forms: Form) -> Form:
    """An object with these names, each of its form; with `others`, there may be more."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(value, path, expected="an object")
        for name, form in forms.items():
            if name in value:
                form(value[name], _inside(path, name))
            elif name not in may_lack:
                raise WrongForm(f"{_inside(path, name)} is missing")
        unknown = [] if others else [name for name in value if name not in forms]
        if unknown:
            raise WrongForm(f"{_inside(path, unknown[0])} is unknown")

    return check


def one_of(values: Collection[str]) -> Form:
    """One of these strings."""

    def check(value: Any, path: str) -> None:
        if not isinstance(value, str) or value not in values:
            raise _wrong(value, path, expected=f"one of {', '.join(values)}")

    return check


def _inside(path: str, name: str) -> str:
    return f"{path}.{name}" if path else _short(name)


def _wrong(value: Any, path: str, *, expected: str) -> WrongForm:
    return WrongForm(f"{_short(path) if path else 'it'} is {_short(value)}, not {expected}")


def _short(value: Any) -> str:
    """On one line; a value by its beginning."""
    if isinstance(value, list | dict):
        return f"a list of {len(value)}" if isinstance(value, list) else f"an object of {len(value)}"
    shown = value if isinstance(value, str) else repr(value)
    shown = " ".join(shown.split())
    return shown if len(shown) <= 60 else f"{shown[:57]}…"
