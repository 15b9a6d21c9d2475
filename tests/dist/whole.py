"""`pytest --whole`: more of the same, for which the usual run has no time."""

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

import pytest

from shardwise.plan.placement import STRATEGIES


def whole(*values: Any) -> list[Any]:
    """Values of a parameter that only the whole run tries."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.whole) for value in values
    ]


def strategies(*usual: str) -> list[Any]:
    """All strategies, of which the usual run tries these."""
    assert set(usual) < set(STRATEGIES)
    return [*usual, *whole(*(name for name in STRATEGIES if name not in usual))]


def in_turn(
    values: Iterable[Any], *usual: Any, every: Iterable[Any] = STRATEGIES, marks: Sequence[pytest.MarkDecorator] = ()
) -> list[Any]:
    """All pairs of a value and a strategy. The usual run tries each value with one of `usual`, these in turn."""
    return [
        pytest.param(value, other, marks=[*marks, *([] if other == now else [pytest.mark.whole])])
        for value, now in zip(values, cycle(usual), strict=False)
        for other in every
    ]
