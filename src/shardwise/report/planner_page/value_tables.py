"""Tables of distinct values, which the rest of a model's data refers to by number."""

from typing import Any


class ValueTables:
    def __init__(self) -> None:
        self._tables: dict[str, dict[Any, int]] = {}

    def number(self, table: str, value: Any) -> int:
        known = self._tables.setdefault(table, {})
        return known.setdefault(value, len(known))

    def values(self, table: str) -> list[Any]:
        return list(self._tables.get(table, {}))
