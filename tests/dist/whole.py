"""`pytest --whole`: more of the same, for which the usual run has no time."""

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
