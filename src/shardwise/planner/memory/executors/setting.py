"""The base of the executors on bytes, and what they need to know."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.plan import Plan
from shardwise.plan.placement import Placement
from shardwise.planner.memory.constants import MemoryRules
from shardwise.planner.memory.replay import Change, MemoryChange
from shardwise.planner.memory.states import UnitStates
from shardwise.program import Operation, Row, StepProgram
from shardwise.program.compiled_program import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySetting:
    """Placements and bytes of all units, and how many units each one stands for (fold.py).

    `update_bytes` (temporaries of the optimizer) and `num_params` count all units of the model. `owned`: the matrices
    that rank 0 owns, of a unit and of those that it stands for.
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

    def with_others(self, num_bytes: int, unit: str) -> tuple[int, int]:
        """Return the bytes of a unit, and those of the equal units that it stands for in addition to itself."""
        return num_bytes, (self.weight(unit) - 1) * num_bytes


class MemoryExecutor:
    """Appends what each operation allocates and frees to `changes`."""

    def __init__(self, program: StepProgram, setting: MemorySetting) -> None:
        self.setting = setting
        self.changes: list[MemoryChange] = []
        self.ready: set[str] = set()
        self._members = {bucket.name: bucket.units for bucket in program.buckets}
        self._gathered: set[str] = set()

    @abstractmethod
    def action(self, operation: Operation, row: Row) -> Action:
        """Return the action of an operation."""

    def skipped(self, operation: Operation, row: Row) -> Action | None:
        return None

    def is_ready(self, unit: str) -> bool:
        return unit in self.ready

    @abstractmethod
    def at_rest(self) -> Mapping[str, int]:
        """Return the bytes by category that the engine holds between steps, except parameters and optimizer state."""

    @abstractmethod
    def buffers_at_rest(self) -> list[int]:
        """Return the sizes of the allocations for gradients among those."""

    def _change(
        self, category: str, num_bytes: int, others: int = 0, *, stream: str = "", pieces: tuple[int, ...] = ()
    ) -> None:
        if num_bytes or others:
            self.changes.append(Change(category, num_bytes, pieces=pieces, stream=stream, others=others))

    def _bytes(self, state: str, units: Iterable[str]) -> tuple[int, int]:
        """Return the bytes of a state of these units, and those of the units that they stand for."""
        sizes = [self.setting.with_others(getattr(self.setting.states[unit], state), unit) for unit in units]
        return sum(size for size, _ in sizes), sum(others for _, others in sizes)

    def _gathered_bytes(self, unit: str) -> tuple[int, int]:
        """Return the bytes of a gathered unit; other units' add up only if they stay gathered after forward."""
        full, others = self._bytes("full", (unit,))
        return full, 0 if self.setting.placements[unit].reshard_after_forward else others

    def _free(self, unit: str) -> None:
        if unit in self._gathered:
            self._gathered.remove(unit)
            full, others = self._gathered_bytes(unit)
            self._change("gathered", -full, -others)

    def _allocate_briefly(self, num_bytes: int) -> None:
        self._change("other", num_bytes)
        self._change("other", -num_bytes)

    def _update(self) -> None:
        self._allocate_briefly(self.setting.update_bytes)
