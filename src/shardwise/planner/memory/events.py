"""Memory events: for each row of a step, the changes that the engine's executor makes, and the model's stream.

`MemoryExecutor` is the base of the executors on bytes; `MemorySetting` is what they need to know.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.plan import Plan
from shardwise.plan.placement import Placement
from shardwise.planner.fold import Key, TracedStep, keys_in_order
from shardwise.planner.memory.constants import MemoryRules
from shardwise.planner.memory.replay import Change, MemoryChange, MemoryRow, MoveSaved
from shardwise.planner.memory.states import UnitStates
from shardwise.planner.memory.stream_peak import StreamPeak
from shardwise.program import Operation, Row, StepProgram, Trigger
from shardwise.program.compiled_program import Action
from shardwise.program.rules.context import saved_before
from shardwise.program.spec import ROOT
from shardwise.program.spec.step import BEFORE_FORWARD, Act, Law, Line, Stream


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


def memory_rows(
    program: StepProgram,
    executor: MemoryExecutor,
    *,
    peaks: Sequence[tuple[Key, StreamPeak]],
    in_order: bool,
    plan: Plan,
    weights: Mapping[str, int],
    rules: MemoryRules,
    saved: Mapping[str, Line],
) -> Iterator[MemoryRow]:
    """Yield the rows in the order of the trace, whose streams have these peaks, or else in that of the program.

    saved   what units save in host memory (Job.saved_by_units)
    """
    by_key = dict(peaks)
    offload = _Offload(saved) if saved else None
    step = TracedStep(program, executor, in_order=in_order)
    for key in keys_in_order(by_key, program=program):
        trigger, unit, _ = key
        weight = weights.get(unit, 1)
        executor.changes = []
        if offload is not None:
            executor.changes += offload.at(key)
        if plan.recompute_of(unit) != "none":
            executor.changes += _random_state(trigger, weight * rules.random_state_bytes)
        step.reach(key)
        yield MemoryRow(
            label=f"{trigger} {unit}", unit=unit, changes=executor.changes, peak=by_key.get(key), repeats=weight
        )


def _random_state(trigger: str, num_bytes: int) -> Iterator[Change]:
    """Yield the change by the random state that is saved for recomputation."""
    if num_bytes and trigger == Trigger.BEFORE_FORWARD.value:
        yield Change("other", num_bytes)
    elif num_bytes and trigger == Trigger.GRADS_READY.value:
        yield Change("other", -num_bytes)


def saved_of_root(streams: Sequence[tuple[Key, Stream]], *, seq: int | None) -> int:
    """Return the bytes of what the root makes before its units, and these save, for no sample: rotary tables.

    All units save the same ones, so they wait in host memory once; the last unit in backward releases them.
    """
    released = (law.line(seq) for law in released_of_root(streams))
    return sum(line.const for line in released if not line.per_sample)


def released_of_root(streams: Sequence[tuple[Key, Stream]]) -> list[Law]:
    """Return the sizes of what the root makes before its units, and these release."""
    made = {
        event.ordinal
        for (trigger, unit, _), stream in streams
        if (trigger, unit) == (BEFORE_FORWARD, ROOT)
        for event in stream.events
    }
    return [
        event.num_bytes
        for (_, unit, _), stream in streams
        if unit != ROOT
        for event in stream.events
        if event.act is Act.DIED and event.owner == ROOT and event.ordinal in made
    ]


class _Offload:
    """A unit's saved activations leave when the next unit's forward ends, and return before the next unit's backward.

    The first unit of backward keeps its own (engine/activations/offload.py).
    """

    def __init__(self, saved: Mapping[str, Line]) -> None:
        self._saved = saved

    def at(self, key: Key) -> Iterator[MoveSaved]:
        trigger, unit, _ = key
        earlier = saved_before(unit, saving=list(self._saved))
        if earlier is not None and trigger in (Trigger.AFTER_FORWARD.value, Trigger.BEFORE_BACKWARD.value):
            to_host = trigger == Trigger.AFTER_FORWARD.value
            yield MoveSaved(unit=earlier, num_bytes=self._saved[earlier], to_host=to_host)
