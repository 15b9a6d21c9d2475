"""Merges steps that differ only in their numbers: each number becomes a column, with one value per step."""

import json
from collections.abc import Mapping
from typing import Any


class NumberedStep:
    """A step as JSON (`form`), in which the result of `note(number)` stands for a number."""

    def __init__(self) -> None:
        self.form: dict[str, Any] = {}
        self.numbers: list[float] = []

    def note(self, number: float) -> dict[str, int]:
        self.numbers.append(number)
        return {"at": len(self.numbers) - 1}


def merged(steps: Mapping[int, NumberedStep]) -> list[dict[str, Any]]:
    """Merge steps, given by number of slices, into one entry per form.

    slices    the numbers of slices, in the order of the columns
    columns   the values of each distinct number for `slices`, or one value if they are equal
    …         the form, in which the index of a column stands for a number
    """
    groups: dict[str, list[int]] = {}
    for slices, step in steps.items():
        groups.setdefault(json.dumps(step.form), []).append(slices)
    return [_entry({slices: steps[slices] for slices in members}) for members in groups.values()]


def _entry(steps: Mapping[int, NumberedStep]) -> dict[str, Any]:
    indices: dict[tuple[float, ...], int] = {}
    places = [
        indices.setdefault(column, len(indices))
        for column in zip(*(step.numbers for step in steps.values()), strict=True)
    ]
    columns = [list(column) if len(set(column)) > 1 else column[0] for column in indices]
    form = next(iter(steps.values())).form
    return {"slices": list(steps), "columns": columns, **_placed(form, places)}


def _placed(form: Any, places: list[int]) -> Any:
    if isinstance(form, dict):
        if form.keys() == {"at"}:
            return places[form["at"]]
        return {name: _placed(value, places) for name, value in form.items()}
    return [_placed(value, places) for value in form] if isinstance(form, list) else form
