"""Pattern → value: settings of a plan that hold for some units only."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from shardwise.files.form import Form, each, table, text

Value = TypeVar("Value")


class Patterns(Mapping[str, Value]):
    """Name patterns (`blocks.0`, `blocks.*`) and their values; ordered, frozen, hashable. A later pattern wins."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Value] | None = None) -> None:
        self._items: tuple[tuple[str, Value], ...] = tuple((items or {}).items())

    def __getitem__(self, pattern: str) -> Value:
        return dict(self._items)[pattern]

    def __iter__(self) -> Iterator[str]:
        return (pattern for pattern, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        # Other mappings ignore the order. Here a later pattern wins over an earlier one.
        return isinstance(other, Patterns) and self._items == other._items

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return repr(dict(self._items))

    def find(self, name: str, *, default: Value) -> Value:
        """Return the value of the last pattern that matches."""
        matching = [value for pattern, value in self._items if fnmatchcase(name, pattern)]
        return matching[-1] if matching else default


# A file shows a pattern on one line.
_PATTERN = Form(words="a pattern for names", fits=text.fits)


def pattern_list(of: str) -> Form:
    """The form of a list of patterns for the names of parameters or modules."""
    return each(_PATTERN, words=f"a list of {of}-name patterns")


# Which units a setting holds for: all, none, or those that a list of patterns matches.
SOME_UNITS = Form(
    words="true, false or a list of unit-name patterns",
    fits=lambda value: isinstance(value, bool | list | tuple),
    read=lambda value, path: value if isinstance(value, bool) else pattern_list("unit")(value, path) or False,
)


def is_among(name: str, chosen: bool | Sequence[str]) -> bool:
    """Return whether a setting for some units holds for the one of this name."""
    return chosen if isinstance(chosen, bool) else any(fnmatchcase(name, pattern) for pattern in chosen)


def pattern_table(form: Form, *, of: str = "unit") -> Form:
    """The form of name patterns (`of`: unit, module) and their values, as `Patterns`."""
    values = table(form)

    def read(value: Mapping[Any, Any], path: str) -> Patterns[Any]:
        for pattern in value:
            _PATTERN(pattern, path)
        return Patterns(values.read(value, path))

    return Form(words=f"a table of {of}-name patterns", fits=values.fits, read=read)


def unmatched(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the patterns that match none of the names, which is most likely a mistake."""
    known = list(names)
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in known)]


def short_patterns(names: Sequence[str], *, among: Sequence[str]) -> tuple[str, ...]:
    """Return patterns that match these names and no others of `among`; names that differ in numbers share one."""
    chosen = set(names)
    found: dict[str, None] = {}
    for name in names:
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        if pattern in found:
            continue
        matches_others = any(fnmatchcase(other, pattern) for other in among if other not in chosen)
        found[name if matches_others else pattern] = None
    return tuple(found)
