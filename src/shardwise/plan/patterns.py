"""Pattern → value: settings of a plan that hold for some units only.

`UnitPolicy` is the policy by which a model is cut into units, as a value. A plan spells it so:

    auto                      the outermost repeated blocks of ModuleList and Sequential stacks; where that leaves
                              most of the model at the root, the large layers of its stacks as well; and large
                              embeddings and heads that share their weights with no other module
    blocks                    the same without embeddings and heads
    class:Block,Bottleneck    every module of these classes
    min-params:1000000        the smallest modules that hold at least so many parameters
    leaf                      every module that holds parameters of its own
    none                      the whole model is one unit
    auto + head + embed       any of these, and the named modules as units of their own

Modules that no unit covers stay at the root, which is always a unit. program/units/unit_modules.py applies the policy.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from shardwise.base.errors import InvalidPlan
from shardwise.base.files.form import Form, each, string, table, text

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


class Cut(Enum):
    """The rule by which modules become units; the value is its spelling."""

    AUTO = "auto"
    BLOCKS = "blocks"
    CLASSES = "class"
    MIN_PARAMS = "min-params"
    LEAVES = "leaf"
    NOTHING = "none"


_SPELLINGS = "auto, blocks, class:NAME,…, min-params:N, leaf, none (each may be followed by + MODULE …)"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPolicy:
    """A rule, its argument, and modules that are units in addition to those of the rule."""

    cut: Cut = Cut.AUTO
    class_names: tuple[str, ...] = ()
    min_params: int = 0
    modules: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "UnitPolicy":
        """Return the policy that `text` spells."""
        rule, *modules = (part.strip() for part in text.split("+"))
        word, colon, argument = (part.strip() for part in rule.partition(":"))
        cut = next((cut for cut in Cut if cut.value == word), None)
        takes_argument = cut in (Cut.CLASSES, Cut.MIN_PARAMS)
        printable = all(module.isprintable() and module for module in modules)
        if cut is None or bool(colon) != takes_argument or not printable:
            raise InvalidPlan(f"units = {text!r}: must be one of {_SPELLINGS}")
        if cut is Cut.MIN_PARAMS:
            return cls(cut=cut, min_params=_parse_count(argument, text=text), modules=tuple(modules))
        class_names = tuple(name.strip() for name in argument.split(",")) if cut is Cut.CLASSES else ()
        for name in class_names:
            if not name.isidentifier():
                raise InvalidPlan(f"units = {text!r}: {name!r} is not a class name")
        return cls(cut=cut, class_names=class_names, modules=tuple(modules))

    def __str__(self) -> str:
        rule = self.cut.value
        if self.cut is Cut.CLASSES:
            rule += ":" + ",".join(self.class_names)
        elif self.cut is Cut.MIN_PARAMS:
            rule += f":{self.min_params}"
        return " + ".join((rule, *self.modules))


AUTO_UNITS = str(UnitPolicy())
"""The usual cut, for which specs come with the package."""

POLICY = Form(words=f"one of {_SPELLINGS}", fits=string.fits, read=lambda value, path: str(UnitPolicy.parse(value)))
"""The form of `units` in a plan. Two spellings of one policy become the same, so that equal plans are equal values."""


def _parse_count(argument: str, *, text: str) -> int:
    digits = argument.replace("_", "")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 18 or int(digits) < 1:
        raise InvalidPlan(f"units = {text!r}: min-params takes a whole number of at least 1")
    return int(digits)
