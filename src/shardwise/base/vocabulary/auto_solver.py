"""The solver of `Plan.auto`, which the top of the package registers: a plan imports nothing of the planner."""

from collections.abc import Callable
from typing import Any

Solver = Callable[..., Any]
"""`train.automatic.auto_plan`, whose arguments are those of `Plan.auto`."""

_registered: list[Callable[[], Solver]] = []


def register_solver(load: Callable[[], Solver]) -> None:
    """Set the function that imports the solver at its first use."""
    _registered[:] = [load]


def auto_solver() -> Solver:
    """Import and return the registered solver."""
    return _registered[0]()
