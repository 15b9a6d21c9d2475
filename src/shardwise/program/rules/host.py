"""What lives in host memory, and how far copies there and back run ahead. Engine and planner follow it.

states       of units with sharded gradients, by plan
gradients    go to the CPU, or are read by an update of states there; a few at a time, or the device would hold them all
activations  of a unit leave while the next one's forward runs, and return while its backward does; the last ones stay
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeVar

from shardwise.plan import Plan
from shardwise.plan.placement import Placement

MOST_GRADS = 2
"""Gradients of flat buffers that are on their way at once; the device waits for earlier ones."""

MOST_SAVED = 1
"""Units whose activations are on their way when a forward ends."""

Item = TypeVar("Item")


def has_states_on_host(unit: str, *, plan: Plan, placement: Placement) -> bool:
    """Return whether the states of a unit live in host memory."""
    return placement.grads.is_sharded and plan.has_states_on_host(unit)


def overdue(under_way: deque[Item], *, most: int) -> Iterator[Item]:
    """Take off, oldest first, what must have arrived before anything else leaves: `most` may be on their way."""
    while len(under_way) > most:
        yield under_way.popleft()


def saved_before(unit: str, *, saving: Sequence[str]) -> str | None:
    """Return the unit that saves before this one: what it has saved is away from this one's forward to its backward."""
    place = saving.index(unit) if unit in saving else 0
    return saving[place - 1] if place else None
