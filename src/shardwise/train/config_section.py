"""A section of a config: a frozen dataclass whose keys say what they may hold. No torch here.

One description of a key, `key(default, what, …)`, gives the check, the error's words and the reference in the docs.
"""

import json
import operator
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from reprlib import repr as _show
from types import NoneType, UnionType
from typing import Any, ClassVar, Self, get_args, get_type_hints

from shardwise.errors import ShardwiseError

PAIR = tuple[float, float]


class InvalidConfig(ShardwiseError):  # noqa: N818 - reads as the first word of the line that users see
    """A training config that cannot be, or that does not fit the run it is to resume."""


def key(
    default: Any,
    what: str,
    *,
    choices: Iterable[str] = (),
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """A key of a section. `default` ... means that it must be given; `least` and `most` may be reached."""
    limits = {"least": least, "above": above, "most": most, "below": below}
    described = {"what": what, "choices": tuple(choices), "limits": limits}
    return field(metadata=described) if default is ... else field(default=default, metadata=described)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSection:
    """What all sections share: values are checked where a section is made, from a file or by hand."""

    section: ClassVar[str]

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for item in fields(self):
            value = getattr(self, item.name)
            object.__setattr__(self, item.name, self._checked(item, value, hint=hints[item.name]))

    def _checked(self, item: "Field[Any]", value: object, *, hint: Any) -> Any:
        """The value in its type (a whole number is also a number, a list is a pair), or what it must be."""
        kind, optional = _kind(hint)
        if value is None and optional:
            return None
        if kind == PAIR and isinstance(value, list | tuple) and len(value) == 2:
            if all(_fits(part, float, item) for part in value):
                return tuple(map(float, value))
        elif kind != PAIR and _fits(value, kind, item):
            return float(value) if kind is float else value  # type: ignore[arg-type]
        raise InvalidConfig(f"{self.section}.{item.name} = {_show(value)}: must be {_allowed(kind, item)}")

    def to_dict(self) -> dict[str, Any]:
        """In TOML's own types; what is None is left out."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None
        }

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """The section that a table of TOML describes."""
        if not isinstance(data, Mapping):
            raise InvalidConfig(f"{cls.section} = {_show(data)}: must be a table, [{cls.section}]")
        known = {item.name: item for item in fields(cls)}
        for name in data:
            if name not in known:
                raise unknown_key(f"{cls.section}.{name}", known=[f"{cls.section}.{other}" for other in known])
        for name, item in known.items():
            if item.default is MISSING and item.default_factory is MISSING and name not in data:
                raise InvalidConfig(f"{cls.section}.{name} is missing: {item.metadata['what']}")
        return cls(**data)

    @classmethod
    def reference(cls) -> list[tuple[str, str, str]]:
        """(key, default, what it is and may be) of each key, for the docs."""
        rows = []
        hints = get_type_hints(cls)
        for item in fields(cls):
            kind, _ = _kind(hints[item.name])
            says_itself = kind is bool or (kind is str and not item.metadata["choices"])
            allowed = "" if says_itself else f"; {_allowed(kind, item)}"
            rows.append((item.name, _default(item), item.metadata["what"] + allowed))
        return rows


def unknown_key(name: str, *, known: Iterable[str]) -> InvalidConfig:
    """The error for a key that no section has, with the nearest that one has."""
    names = list(known)
    near = get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
    return InvalidConfig(f"unknown key {name if name.isprintable() else _show(name)}; {hint}")


def _kind(hint: Any) -> tuple[Any, bool]:
    """What a value is, and whether it may be None."""
    if isinstance(hint, UnionType):
        kind, none = get_args(hint)
        assert none is NoneType
        return kind, True
    return hint, False


def _default(item: "Field[Any]") -> str:
    if item.default is MISSING:
        return "required"
    if item.default is None:
        return "–"
    return f"`{json.dumps(item.default)}`"


def _fits(value: object, kind: Any, item: "Field[Any]") -> bool:
    if kind is bool:
        return isinstance(value, bool)
    if kind is str:
        choices = item.metadata["choices"]
        return isinstance(value, str) and value != "" and value.isprintable() and (not choices or value in choices)
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        return False
    limits = item.metadata["limits"]
    return abs(value) < 2**63 and all(
        limit is None or compare(value, limit)
        for limit, compare in (
            (limits["least"], operator.ge),
            (limits["above"], operator.gt),
            (limits["most"], operator.le),
            (limits["below"], operator.lt),
        )
    )


def _allowed(kind: Any, item: "Field[Any]") -> str:
    if item.metadata["choices"]:
        return f"one of {', '.join(item.metadata['choices'])}"
    words = {bool: "true or false", str: "a text", int: "a whole number", float: "a number", PAIR: "two numbers"}
    spelled = {"least": "of at least", "above": "above", "most": "at most", "below": "below"}
    limits = [f"{spelled[name]} {limit:,}" for name, limit in item.metadata["limits"].items() if limit is not None]
    return f"{words[kind]} {' and '.join(limits)}".strip()
