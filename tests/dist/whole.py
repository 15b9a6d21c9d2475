"""`pytest --whole`: more of the same, for which the usual run has no time."""

from typing import Any

import pytest


def whole(*values: Any) -> list[Any]:
    """Values of a parameter that only the whole run tries."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.whole) for value in values
    ]
