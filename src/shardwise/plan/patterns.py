"""Pattern → value: what a plan says of some units and not of others."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from reprlib import repr as _show

from shardwise.errors import InvalidPlan


class Patterns(Mapping[str, str]):
    """Name patterns (`blocks.0`, `blocks.*`) and what they stand for; ordered, frozen, hashable. A later one wins."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, str] | None = None) -> None:
        self._items = tuple((items or {}).items())

    def __getitem__(self, pattern: str) -> str:
        return dict(self._items)[pattern]

    def __iter__(self) -> Iterator[str]:
        return (pattern for pattern, _ in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        # Unlike other mappings, in order: a later pattern wins over an earlier one.
        return isinstance(other, Patterns) and self._items == other._items

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return repr(dict(self._items))

    def find(self, name: str, *, default: str) -> str:
        """The value of the last pattern that matches."""
        matching = [value for pattern, value in self._items if fnmatchcase(name, pattern)]
        return matching[-1] if matching else default


def check_pattern(pattern: object, *, key: str) -> str:
    """A pattern that a file can show on one line."""
    if not isinstance(pattern, str) or not pattern or not pattern.isprintable():
        raise InvalidPlan(f"{key}: {_show(pattern)} is not a pattern for names")
    return pattern


def unmatched(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The patterns that match none of the names: most likely a slip."""
    known = list(names)
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in known)]


def short_patterns(names: Sequence[str], *, among: Sequence[str]) -> tuple[str, ...]:
    """Patterns that match these names and no others of `among`: one for all that differ in numbers only."""
    chosen = set(names)
    found: dict[str, None] = {}
    for name in names:
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        if pattern in found:
            continue
        matches_others = any(fnmatchcase(other, pattern) for other in among if other not in chosen)
        found[name if matches_others else pattern] = None
    return tuple(found)
