"""Fixed addresses for gathered parameters: a graph reads them where they were when it was recorded.

Each unit has a slot, and units that are never gathered at the same time share one, as the program says. A slot is a
pool of the allocator's memory with room for one buffer: what is allocated there is always at the same address. Where a
pass leaves the program and a slot is taken, the buffer comes to lie elsewhere, and its unit runs as an ordinary one.
"""

from collections.abc import Iterable
from types import TracebackType

import torch

from shardwise.base.torch_internals import torch_private
from shardwise.engine.core.unit import Unit
from shardwise.engine.graphs.graph_pool import fix_segments
from shardwise.program import Kind, StepProgram


def slot_numbers(program: StepProgram, *, units: Iterable[str]) -> dict[str, int]:
    """Return the slot of each unit: different ones for units that are gathered at the same time."""
    numbers: dict[str, int] = {}
    conflicts: dict[str, set[str]] = {name: set() for name in units}
    live: set[str] = set()
    # Twice, because what is gathered at the end of a step may still be at the beginning of the next.
    operations = [operation for row in program.rows for operation in row.operations] * 2
    for operation in operations:
        name = operation.subject
        if name not in conflicts:
            continue
        if operation.kind is Kind.GATHER:
            conflicts[name] |= live - {name}
            for other in live:
                conflicts[other] |= {name} - {other}
            live.add(name)
        elif operation.kind is Kind.FREE:
            live.discard(name)
    for name, others in conflicts.items():
        taken = {numbers[other] for other in others if other in numbers}
        numbers[name] = next(number for number in range(len(taken) + 1) if number not in taken)
    return numbers


class Slot:
    """Memory for one buffer at a time; inside a `with` block, this thread allocates there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device.index
        fix_segments()
        self._pool = torch.cuda.MemPool()

    def __enter__(self) -> None:
        torch_private.begin_allocate_thread_to_pool(self._device, self._pool.id)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch_private.end_allocate_to_pool(self._device, self._pool.id)
        torch_private.release_pool(self._device, self._pool.id)


class Slots:
    """The slots of one model's sharded units."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int], Slot] = {}

    def assign(self, units: Iterable[Unit], *, program: StepProgram) -> None:
        """Gather into slots from now on."""
        sharded = [unit for unit in units if unit.sharded]
        numbers = slot_numbers(program, units=[unit.name for unit in sharded])
        for unit in sharded:
            for index, flat in enumerate(unit.flats):
                place = (numbers[unit.name], index)
                if place not in self._slots:
                    self._slots[place] = Slot(flat.device)
                flat.full.allocate_in(self._slots[place])

    def leave(self, units: Iterable[Unit]) -> None:
        """Gather into any memory from now on."""
        for unit in units:
            for flat in unit.flats:
                flat.full.allocate_in(None)
        self._slots.clear()
