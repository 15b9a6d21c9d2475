"""Keys: the fields of a dataclass that a file sets. One description of a key gives its check, its error and its docs.

    steps: int = key(10, "optimizer steps", least=1)

`steps = 0` raises "steps = 0: must be a whole number of at least 1". The reference has the row "steps | 10 |
optimizer steps; a whole number of at least 1".
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from textwrap import wrap
from types import NoneType
from typing import Any, TypeVar, Unpack, get_args, get_origin, get_type_hints

from shardwise.base.errors import ShardwiseError
from shardwise.base.files.form import (
    Form,
    Limits,
    WrongForm,
    each,
    number,
    one_of,
    optional,
    pair,
    record_of,
    string,
    switch,
    table,
    text,
    whole,
)

Class = TypeVar("Class", bound=type)

# The words of these forms add nothing to the description of a key.
_SAY_NOTHING = (string.words, text.words, switch.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    what: str
    form: Form | None
    choices: tuple[str, ...]
    limits: Limits
    filled_in: str = ""


def key(
    default: Any,
    what: str,
    *,
    form: Form | None = None,
    choices: Iterable[str] = (),
    filled_in: str = "",
    **limits: Unpack[Limits],
) -> Any:
    """Return a field of a dataclass with its description. Its type gives its form, unless `form` does.

    default     `...` for a key that must be given; a class for a new object of it in each record
    filled_in   value in words, where whoever reads the file gives one before the record is made
    """
    described = {"key": _Key(what=what, form=form, choices=tuple(choices), limits=limits, filled_in=filled_in)}
    if default is ...:
        return field(metadata=described)
    if isinstance(default, type):
        return field(default_factory=default, metadata=described)
    return field(default=default, metadata=described)


@cache
def _forms(kind: type) -> list[tuple["Field[Any]", Form]]:
    hints = get_type_hints(kind)
    return [(item, _form(hints[item.name], item.metadata["key"])) for item in fields(kind) if "key" in item.metadata]


def forms_of(kind: type) -> dict[str, Form]:
    """Return key → form."""
    return {item.name: form for item, form in _forms(kind)}


def values_of(kind: type) -> Form:
    """Accept a table of the keys of a dataclass, where those without a default must be given; return a dict."""
    needs = {item.name: item.metadata["key"].what for item, _ in _forms(kind) if _is_required(item)}
    return record_of(forms_of(kind), needs=needs)


def object_of(kind: type) -> Form:
    """Accept an object of a dataclass, or the table that describes it; return the object."""
    values = values_of(kind)

    def read(value: Any, path: str) -> Any:
        if isinstance(value, kind):
            return value
        given = values.read(value, path)
        try:
            return kind(**given)
        except ShardwiseError as error:
            raise WrongForm(f"{path}: {error}") from error

    words = f"a {kind.__name__}, or a table of {' and '.join(forms_of(kind))}"
    return Form(words=words, fits=lambda value: isinstance(value, kind) or values.fits(value), read=read)


def check_keys(record: Any, *, path: str = "", error: type[ShardwiseError]) -> None:
    """Check every key of an object, and set it to the value that its form reads. Call it in `__post_init__`.

    A default is not checked: a test makes sure that every default has its form.
    """
    prefix = f"{path}." if path else ""
    try:
        kind: type = type(record)
        for item, form in _forms(kind):
            value = getattr(record, item.name)
            if value is not item.default:
                object.__setattr__(record, item.name, form(value, prefix + item.name))
    except WrongForm as wrong:
        raise error(wrong.advice) from wrong


def to_table(record: Any) -> dict[str, Any]:
    """Return every key in TOML's own types; keys that are None are left out."""
    values = {name: _plain(getattr(record, name)) for name in forms_of(type(record))}
    # Tables go last: a key after a table's header would belong to the table.
    tables_last = sorted(values.items(), key=lambda item: isinstance(item[1], dict))
    return {name: value for name, value in tables_last if value is not None}


def reference(kind: type) -> list[tuple[str, str, str]]:
    """Return (key, default, description and allowed values) of each key, for the docs."""
    return [(item.name, _default(item), _description(item, form)) for item, form in _forms(kind)]


def documented(kind: Class) -> Class:
    """Add the keys to the docstring of a dataclass."""
    rows = reference(kind)
    indent = max(len(name) for name, _, _ in rows) + 3
    lines = [
        line
        for name, _, what in rows
        for line in wrap(what, 116, initial_indent=name.ljust(indent), subsequent_indent=" " * indent)
    ]
    kind.__doc__ = "\n".join([(kind.__doc__ or "").rstrip(), "", *(f"    {line}" for line in lines)])
    return kind


def _is_required(item: "Field[Any]") -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _form(hint: Any, described: _Key) -> Form:
    parts = get_args(hint)
    if NoneType in parts:
        return optional(described.form or _form(parts[0], described))
    if described.form is not None:
        return described.form
    if hint is bool:
        return switch
    if hint is str:
        return one_of(described.choices) if described.choices else text
    if hint in (int, float):
        return (whole if hint is int else number)(**described.limits)
    if hint == tuple[float, float]:
        return pair(**described.limits)
    if get_origin(hint) in (tuple, Sequence):
        return each(_form(parts[0], described))
    if get_origin(hint) is Mapping:
        return table(_form(parts[1], described))
    assert is_dataclass(hint), f"{hint} needs a form"
    return object_of(hint)  # type: ignore[arg-type]


def _description(item: "Field[Any]", form: Form) -> str:
    what: str = item.metadata["key"].what
    return what if form.words in _SAY_NOTHING else f"{what}; {form.words}"


def _default(item: "Field[Any]") -> str:
    if _is_required(item):
        return item.metadata["key"].filled_in or "required"
    empty = isinstance(item.default, Collection) and not item.default
    if item.default is None or item.default is MISSING or empty:
        return "–"
    return f"`{json.dumps(item.default)}`"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return dict(value)
    return to_table(value) if is_dataclass(value) else value
