"""A stand-in for the `datasets` package, which TRL imports: rows in a list, for machines without the package."""

import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

Row = dict[str, Any]


class Dataset:
    """The methods of datasets.Dataset that TRL's trainers call."""

    def __init__(self, rows: list[Row]) -> None:
        self.format, self.cache_files = {"type": None}, ()
        self._rows = rows

    @classmethod
    def from_list(cls, rows: list[Row]) -> "Dataset":
        return cls(rows)

    @property
    def column_names(self) -> list[str]:
        return list(self._rows[0])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __getitem__(self, number: int) -> Row:
        return self._rows[number]

    def map(self, function: Callable[..., Row], *, fn_kwargs: Row | None = None, **_: Any) -> "Dataset":
        return Dataset([row | function(row, **(fn_kwargs or {})) for row in self._rows])

    def filter(self, function: Callable[[Row], bool], **_: Any) -> "Dataset":
        return Dataset([row for row in self._rows if function(row)])

    def remove_columns(self, names: list[str]) -> "Dataset":
        return Dataset([{name: row[name] for name in row if name not in names} for row in self._rows])


def install() -> bool:
    """Take the place of `datasets` where it is not installed; return whether this was necessary."""
    if find_spec("datasets") is not None:
        return False

    def module(name: str, **contents: Any) -> ModuleType:
        made = ModuleType(name)
        made.__spec__, made.__dict__["__version__"] = ModuleSpec(name, None), "5.0.0"
        made.__dict__.update(contents)
        sys.modules[name] = made
        return made

    others = ("DatasetDict", "IterableDataset", "IterableDatasetDict")
    made = module(
        "datasets", Dataset=Dataset, concatenate_datasets=None, **{name: type(name, (), {}) for name in others}
    )
    made.__path__ = []
    made.__dict__["fingerprint"] = module("datasets.fingerprint", Hasher=None)
    return True
