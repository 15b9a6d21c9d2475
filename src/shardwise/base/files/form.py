"""Forms: what a value of a TOML or JSON file may be. One description gives the check and the words of the error.

    record(name=string, sizes=each(whole(least=0)), limit=optional(number(above=0)))

A form is called with a value and its path. It returns the value in its Python type, or raises `WrongForm`.
keys.py gives each field of a dataclass its form.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from reprlib import repr as show
from typing import Any, TypedDict, Unpack

from shardwise.base.errors import ShardwiseError, UnknownName

# Integers of TOML have 64 bits. A larger number is a mistake in every file of ours.
_TOO_LARGE = 2**63


class WrongForm(ShardwiseError):  # noqa: N818
    """A value does not have its form; the reader of the file adds the file's name.

    The message says what a damaged file holds. `advice` says what the user should write instead.
    """

    def __init__(self, message: str, *, advice: str = "") -> None:
        super().__init__(message)
        self.advice = advice or message


@contextmanager
def refusing(error: type[ShardwiseError]) -> Iterator[None]:
    """Raise `error`, with the advice to the user, where a value does not have its form."""
    try:
        yield
    except WrongForm as wrong:
        raise error(wrong.advice) from wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """`words` complete "must be …". `read` converts a value that fits, and checks the values inside it."""

    words: str
    fits: Callable[[Any], bool]
    read: Callable[[Any, str], Any] = lambda value, path: value

    def __call__(self, value: Any, path: str) -> Any:
        if not self.fits(value):
            place, shown = path or "it", show(value)
            raise WrongForm(f"{place} is {shown}, not {self.words}", advice=f"{place} = {shown}: must be {self.words}")
        return self.read(value, path)

    def then(self, convert: Callable[[Any, str], Any]) -> "Form":
        """Return the same form, which passes the value on to `convert`. Another form is such a function."""
        return Form(words=self.words, fits=self.fits, read=lambda value, path: convert(self.read(value, path), path))


anything = Form(words="anything", fits=lambda value: True)
string = Form(words="a string", fits=lambda value: isinstance(value, str))
text = Form(words="a text", fits=lambda value: isinstance(value, str) and value != "" and value.isprintable())
switch = Form(words="true or false", fits=lambda value: isinstance(value, bool))


class Limits(TypedDict, total=False):
    """The range of a number, which includes `least` and `most`."""

    least: float
    above: float
    most: float
    below: float


_LIMITS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "least": ("of at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
    "below": ("below", operator.lt),
}


def whole(**limits: Unpack[Limits]) -> Form:
    """Accept a whole number."""
    return Form(words=_words("a whole number", limits), fits=_range(int, limits))


def number(**limits: Unpack[Limits]) -> Form:
    """Accept a number; return a float."""
    return Form(
        words=_words("a number", limits), fits=_range((int, float), limits), read=lambda value, path: float(value)
    )


def pair(**limits: Unpack[Limits]) -> Form:
    """Accept two numbers; return a tuple of floats."""
    fits = _range((int, float), limits)
    return Form(
        words=_words("two numbers", limits),
        fits=lambda value: isinstance(value, list | tuple) and len(value) == 2 and all(map(fits, value)),
        read=lambda value, path: tuple(map(float, value)),
    )


def _words(noun: str, limits: Limits) -> str:
    return f"{noun} {' and '.join(f'{_LIMITS[name][0]} {limit:,}' for name, limit in limits.items())}".strip()


def _range(kind: Any, limits: Limits) -> Callable[[Any], bool]:
    bounds = [(_LIMITS[name][1], limit) for name, limit in limits.items()]

    def fits(value: Any) -> bool:
        # A bool is an int to Python. NaN and infinity are not below any number.
        if isinstance(value, bool) or not isinstance(value, kind) or not abs(value) < _TOO_LARGE:
            return False
        return all(compare(value, limit) for compare, limit in bounds)

    return fits


def one_of(choices: Collection[str]) -> Form:
    """Accept one of these strings."""
    return Form(words=f"one of {', '.join(choices)}", fits=lambda value: isinstance(value, str) and value in choices)


def optional(form: Form) -> Form:
    """Accept the form, or null."""
    return Form(
        words=form.words,
        fits=lambda value: value is None or form.fits(value),
        read=lambda value, path: None if value is None else form.read(value, path),
    )


def each(form: Form, *, least: int = 0, words: str = "a list") -> Form:
    """Accept a list of at least `least` values of the form; return a tuple."""
    return Form(
        words=f"{words} of at least {least}" if least else words,
        fits=lambda value: isinstance(value, list | tuple) and len(value) >= least,
        read=lambda value, path: tuple(form(item, f"{path}[{index}]") for index, item in enumerate(value)),
    )


def row(*forms: Form, words: str = "") -> Form:
    """Accept a list with one value per form; return a tuple."""
    return Form(
        words=words or f"a list of {len(forms)}",
        fits=lambda value: isinstance(value, list | tuple) and len(value) == len(forms),
        read=lambda value, path: tuple(
            form(item, f"{path}[{index}]") for index, (form, item) in enumerate(zip(forms, value, strict=True))
        ),
    )


def table(form: Form, *, keys: Collection[str] | None = None, needs: Collection[str] = ()) -> Form:
    """Accept a table whose values all have the form. `keys`: the names it may have. `needs`: those it must have."""

    def read(value: Mapping[str, Any], path: str) -> dict[str, Any]:
        check_names(value, path, known=value if keys is None else keys, needs=dict.fromkeys(needs, ""))
        return {name: form(item, inside(path, name)) for name, item in value.items()}

    return Form(words="a table", fits=_is_table, read=read)


def record(*, may_lack: Collection[str] = (), others: bool = False, **forms: Form) -> Form:
    """Accept a table with these names, each of its form; `others` allows more names. Return a dict of what is given."""
    return record_of(forms, needs={name: "" for name in forms if name not in may_lack}, others=others)


def record_of(forms: Mapping[str, Form], *, needs: Mapping[str, str], others: bool = False) -> Form:
    """Accept a table like `record`. `needs`: name → description, for the names that must be given."""

    def read(value: Mapping[str, Any], path: str) -> dict[str, Any]:
        check_names(value, path, known=value if others else forms, needs=needs)
        return {name: form(value[name], inside(path, name)) for name, form in forms.items() if name in value}

    return Form(words="a table", fits=_is_table, read=read)


def check_names(
    value: Mapping[str, Any], path: str, *, known: Collection[str], needs: Mapping[str, str] | None = None
) -> None:
    """Raise an error for a name that is not known, or for one that is missing."""
    for name in value:
        if name not in known:
            raise WrongForm(f"{f'{path}: ' if path else ''}{UnknownName.of('key', str(name), known=known)}")
    for name, what in (needs or {}).items():
        if name not in value:
            raise WrongForm(f"{inside(path, name)} is missing{f': {what}' if what else ''}")


def inside(path: str, name: str) -> str:
    """Return the path of a value in a table."""
    shown = name if name.isprintable() and len(name) <= 60 else show(name)
    return f"{path}.{shown}" if path else shown


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)
