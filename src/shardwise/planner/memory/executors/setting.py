"""What the executors on bytes have in common."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from shardwise.plan import Plan
from shardwise.plan.placement import Placement
from shardwise.planner.memory.constants import MemoryRules
from shardwise.planner.memory.replay import Change, MemoryChange
from shardwise.planner.memory.states import UnitStates
from shardwise.planner.trace_order import PlannedExecutor


class MemoryExecutor(PlannedExecutor, Protocol):
    """An executor on bytes: what it does is appended to `changes`."""

    changes: list[MemoryChange]

    def at_rest(self) -> Mapping[str, int]:
        """Bytes by category that the engine holds between steps, less parameters and optimizer state."""
        ...

    def buffers_at_rest(self) -> list[int]:
        """Of that, the single allocations for gradients."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySetting:
    """What an executor has to know: where everything lives, in bytes, and how often each unit counts.

    Of all units, also those that are left out: `update_bytes`, what the optimizer makes for a while, and `num_params`.
    `owned`: of a unit and those that it stands for, the matrices that rank 0 owns.
    """

    plan: Plan
    placements: Mapping[str, Placement]
    states: Mapping[str, UnitStates]
    weights: Mapping[str, int]
    rules: MemoryRules
    update_bytes: int
    num_params: int
    num_slices: int
    owned: Mapping[str, int]

    def weight(self, unit: str) -> int:
        return self.weights.get(unit, 1)

    def left_out(self, unit: str) -> int:
        """How many units this one stands for in addition to itself."""
        return self.weights.get(unit, 1) - 1


def update_changes(num_bytes: int) -> Iterable[Change]:
    """What the optimizer makes for a while comes and goes."""
    return Change("other", num_bytes), Change("other", -num_bytes)
