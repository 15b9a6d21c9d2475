"""A step as single allocations and releases, in order, for the model of the caching allocator.

Each allocation has a slot, a stream, and a size that is a line in the batch. Releases are matched with allocations here
once, for all batches.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardwise.planner.memory.replay import Change, MemoryChange, MemoryRow, MoveSaved, Recategorize, TakeGrads
from shardwise.planner.memory.stream_peak import Size
from shardwise.program.gradient_place import places_gradients
from shardwise.program.spec.step import BEFORE_BACKWARD, IN_UNIT, Act, Line, StorageEvent, What

UNIT_GRAPHS = "unit graphs"
"""The stream of the pool in which CUDA graphs of units have their tensors."""

GRADIENTS = "gradients"
"""The stream of averaged gradients that lie in the pool of units' graphs, or in ordinary memory."""

SLOTS = "slots"
"""The stream of the memory in which units that are CUDA graphs are gathered."""

AllocationEntry = tuple[int, int, str]
"""(slot, number of its size, stream) of an allocation; (slot, -1, "") of a release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMemory:
    """Bytes of a pass whose units are graphs; `loss`: what backward needs and no unit keeps."""

    activations: int
    loss: int
    gradients: int
    num_units: int

    @property
    def places_gradients(self) -> bool:
        return places_gradients(self.activations, loss=self.loss, gradients=self.gradients)

    def graph_bytes(self, *, with_gradients: bool) -> int:
        """Return what is reserved in one piece for the graphs (engine/graphs/arena.py)."""
        gradients = self.gradients if with_gradients else 0
        return max(self.activations, gradients) + self.activations // max(self.num_units, 1)


@dataclass(slots=True)
class Ledger:
    """The entries of a step without the optimizer's state; `update_at` is the position of the update.

    `sizes`: the different sizes with their numbers, which are far fewer than the entries.
    `first_grad_at`: position after the first gradient of a parameter, usually from the first product of backward;
    `backward_at`: that of its beginning. `graph_units`: what these units compute lies in a pool of its own;
    `gradients_apart`: averaged gradients have a stream of their own.
    """

    grads_leave_at_once: bool
    graph_units: frozenset[str] = frozenset()
    gradients_apart: bool = False
    entries: list[AllocationEntry] = field(default_factory=list)
    sizes: dict[Size, int] = field(default_factory=dict)
    update_at: int = 0
    first_grad_at: int = 0
    backward_at: int = 0
    # Sizes of averaged gradients with a stream of their own.
    gradients: list[Size] = field(default_factory=list)
    _num_slots: int = 0
    # The entry of each slot's allocation.
    _places: dict[int, int] = field(default_factory=dict)
    # Of the model's storages at this point.
    _stream: str = ""
    # Buffers of the engine by category, stream and size, oldest first.
    _buffers: dict[tuple[str, str, int, int], deque[list[int]]] = field(default_factory=lambda: defaultdict(deque))
    # Slots of the model's storages by unit and number; storages by law, for releases by another unit.
    _storages: dict[tuple[str, int], int] = field(default_factory=dict)
    _sizes: dict[int, Size] = field(default_factory=dict)
    _by_size: dict[Size, list[tuple[str, int]]] = field(default_factory=lambda: defaultdict(list))
    _grads: dict[str, dict[tuple[str, int], int]] = field(default_factory=lambda: defaultdict(dict))

    def write(self, rows: Iterable[MemoryRow]) -> None:
        for row in rows:
            if row.label.startswith("after step"):
                self.update_at = len(self.entries)
            if row.label.startswith(BEFORE_BACKWARD) and not self.backward_at:
                self.backward_at = len(self.entries)
            for change in row.changes:
                self._change(change)
            if row.peak is not None:
                is_graph = row.unit in self.graph_units and row.label.startswith(IN_UNIT)
                events = row.peak.stream.events
                own = _num_own(events) if is_graph else 0
                for number, (event, size) in enumerate(zip(events, row.peak.sizes, strict=True)):
                    self._stream = UNIT_GRAPHS if number < own else ""
                    self._event(row.unit, event, size)
        self._zero_grad()

    def parts(self) -> tuple[list[AllocationEntry], list[AllocationEntry], list[AllocationEntry]]:
        """Return the entries up to the first gradient, up to the update, and after it."""
        first, update = self.first_grad_at, self.update_at
        return self.entries[:first], self.entries[first:update], self.entries[update:]

    def pass_memory(self, batch: int) -> "PassMemory":
        """Return what there is when backward begins (engine/graphs/arena.py observes it)."""
        live: dict[int, tuple[str, int]] = {}
        sizes = [size.at(batch) for size in self.sizes]
        for slot, number, stream in self.entries[: self.backward_at]:
            if number < 0:
                live.pop(slot, None)
            else:
                live[slot] = stream, sizes[number]
        return PassMemory(
            activations=sum(size for stream, size in live.values() if stream == UNIT_GRAPHS),
            loss=sum(size for stream, size in live.values() if not stream),
            gradients=sum(size.at(batch) for size in self.gradients),
            num_units=len(self.graph_units),
        )

    def _allocate(self, size: Size, *, stream: str = "") -> int:
        self._num_slots += 1
        self._places[self._num_slots] = len(self.entries)
        self.entries.append((self._num_slots, self.sizes.setdefault(size, len(self.sizes)), stream))
        self._sizes[self._num_slots] = size
        return self._num_slots

    def _release(self, slots: Iterable[int]) -> None:
        self.entries.extend((slot, -1, "") for slot in slots)

    def _change(self, change: MemoryChange) -> None:
        if isinstance(change, TakeGrads):
            self._take_grads(change)
        elif isinstance(change, MoveSaved):
            self._move_saved(change)
        elif isinstance(change, Recategorize):
            held = self._buffers[change.before, "", change.num_bytes, 0]
            if held:
                slots = held.popleft()
                self._buffers[change.after, "", change.num_bytes, 0].append(slots)
                if change.after == "grads" and self.gradients_apart:
                    self._move_apart(slots)
        elif change.const > 0 or change.per_sample > 0:
            sizes = [Line(piece, 0) for piece in change.pieces] or [Line(change.const, change.per_sample)]
            stream = self._stream_of(change)
            slots = [self._allocate(size, stream=stream) for size in sizes]
            if stream == GRADIENTS:
                self.gradients += sizes
            self._buffers[change.category, change.stream, change.const, change.per_sample].append(slots)
        elif change.const or change.per_sample:
            held = self._buffers[change.category, change.stream, -change.const, -change.per_sample]
            if held:
                self._release(held.popleft())

    def _take_grads(self, change: TakeGrads) -> None:
        """Release the gradients of a unit but the one that is kept, whose bytes may have been rounded up."""
        taken = self._grads.pop(change.unit, {})
        sizes = {key: self._sizes[slot].at(1) for key, slot in taken.items()}
        fitting = [key for key, size in sizes.items() if size <= change.kept]
        if fitting:
            kept = max(fitting, key=sizes.__getitem__)
            self._grads[change.unit][kept] = taken.pop(kept)
        self._release(taken.values())

    def _move_saved(self, change: MoveSaved) -> None:
        """Release the storages that a unit has left behind; or allocate them again, for backward to release."""
        for key, slot in self._storages.items():
            if key[0] == change.unit:
                if change.to_host:
                    self._release([slot])
                else:
                    self._storages[key] = self._allocate(self._sizes[slot])

    def _stream_of(self, change: Change) -> str:
        if change.category == "gathered" and self.graph_units:
            return SLOTS
        return GRADIENTS if change.category == "grads" and self.gradients_apart else change.stream

    def _move_apart(self, slots: Sequence[int]) -> None:
        """Have buffers that become gradients where these lie, from their allocation on."""
        for slot in slots:
            size = self._sizes[slot]
            self.entries[self._places[slot]] = (slot, self.sizes[size], GRADIENTS)
            self.gradients.append(size)

    def _zero_grad(self) -> None:
        for key in [key for key in self._buffers if key[0] == "grads"]:
            for slots in self._buffers.pop(key):
                self._release(slots)

    def _event(self, unit: str, event: StorageEvent, size: Size) -> None:
        if event.act is Act.BORN:
            self._born(unit, event, size)
        elif event.act is Act.DIED:
            self._died(unit, event, size)
        elif self.grads_leave_at_once:
            pending = self._grads[event.owner or unit]
            born_here = (unit, event.ordinal)
            key = born_here if born_here in pending else next(iter(pending), None)
            if key is not None:
                self._release([pending.pop(key)])

    def _born(self, unit: str, event: StorageEvent, size: Size) -> None:
        slot = self._allocate(size, stream=self._stream)
        if event.what is What.SCRATCH:
            self._release([slot])
            return
        assert event.ordinal is not None
        key = (unit, event.ordinal)
        if event.what is What.GRADIENT:
            self._grads[event.owner or unit][key] = slot
            self.first_grad_at = self.first_grad_at or len(self.entries)
            return
        self._storages[key] = slot
        self._by_size[size].append(key)

    def _died(self, unit: str, event: StorageEvent, size: Size) -> None:
        key = (event.owner or unit, event.ordinal) if event.ordinal is not None else None
        # By the size at this length, not by the law: traces of one length and of all lengths may be mixed.
        alike = self._by_size[size]
        if key is None:
            # The latest one of that size from another unit: backward visits units in reverse.
            key = next((one for one in reversed(alike) if one[0] != unit), None)
        if key is not None and key in self._storages:
            alike.remove(key)
            self._release([self._storages.pop(key)])


def _num_own(events: Sequence[StorageEvent]) -> int:
    """Return how many events of a unit's row are its own: those of the root may follow, as of an embedding's gradient.

    They begin when the last storage that the unit has kept from earlier rows is gone.
    """
    if not any(event.owner for event in events if event.what is What.GRADIENT):
        return len(events)
    born = {event.ordinal for event in events if event.act is Act.BORN}
    kept = [
        number
        for number, event in enumerate(events)
        if event.act is Act.DIED and not event.owner and event.ordinal is not None and event.ordinal not in born
    ]
    return kept[-1] + 1 if kept else 0
