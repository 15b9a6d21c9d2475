"""A section of a config: a frozen dataclass whose fields are keys (base/files/keys.py). No torch here."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from reprlib import repr as show
from typing import Any, ClassVar, Self

from shardwise.base.errors import ShardwiseError
from shardwise.base.files.form import refusing
from shardwise.base.files.keys import check_keys, forms_of, to_table, values_of


class InvalidConfig(ShardwiseError):  # noqa: N818 - reads as the first word of the line that users see
    """A training config is wrong, or does not match the run that it should resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSection:
    """The base of all sections: it checks every value, from a file or from Python."""

    section: ClassVar[str]

    def __post_init__(self) -> None:
        check_keys(self, path=self.section, error=InvalidConfig)

    def to_dict(self) -> dict[str, Any]:
        """Return the section in TOML's own types; keys that are None are left out."""
        return to_table(self)

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the section that a table of TOML describes."""
        if not isinstance(data, Mapping):
            raise InvalidConfig(f"{cls.section} = {show(data)}: must be a table, [{cls.section}]")
        known = forms_of(cls)
        for name in data:
            if name not in known:
                raise unknown_key(f"{cls.section}.{name}", known=[f"{cls.section}.{other}" for other in known])
        with refusing(InvalidConfig):
            return cls(**values_of(cls)(data, cls.section))


def unknown_key(name: str, *, known: Iterable[str]) -> InvalidConfig:
    """Return the error for a key that no section has, with the nearest known key."""
    names = list(known)
    near = get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
    return InvalidConfig(f"unknown key {name if name.isprintable() else show(name)}; {hint}")
