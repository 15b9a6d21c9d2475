"""Memory for the graphs of passes: one pass at a time uses an arena, and passes that overlap use several."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shardwise.engine.graphs.graph_device import GraphDevice
from shardwise.engine.graphs.recorded_pass import RecordedPass
from shardwise.program.gradient_place import places_gradients

# Forms of passes whose graphs are kept in one arena, and passes that may overlap.
_MOST_FORMS = 32
_MOST_ARENAS = 2


@dataclass(slots=True)
class ObservedMemory:
    """Memory of an ordinary pass: what calls of units leave for backward, what else there is for it, and gradients.

    begin_bytes   all tensors when the pass begins
    """

    begin_bytes: int
    num_calls: int = 0
    activation_bytes: int = 0
    loss_bytes: int = 0
    gradient_bytes: int = 0

    def add_call(self, num_bytes: int) -> None:
        self.num_calls += 1
        self.activation_bytes += max(num_bytes, 0)

    def begin_backward(self, num_bytes: int) -> None:
        self.loss_bytes = max(num_bytes - self.begin_bytes - self.activation_bytes, 0)

    def scaled(self, factor: float) -> "ObservedMemory":
        """Return the memory of a pass with `factor` times the inputs."""
        activations, loss = round(factor * self.activation_bytes), round(factor * self.loss_bytes)
        return replace(self, activation_bytes=activations, loss_bytes=loss)

    @property
    def places_gradients(self) -> bool:
        """Return whether gradients take the place of activations in the memory of graphs.

        Where units keep less than that, ordinary memory has more room: that of logits, which the loss has left.
        """
        return places_gradients(self.activation_bytes, loss=self.loss_bytes, gradients=self.gradient_bytes)

    @property
    def pass_bytes(self) -> int:
        """The memory of graphs of such a pass, with the temporaries of one unit."""
        gradients = self.gradient_bytes if self.places_gradients else 0
        return max(self.activation_bytes, gradients) + self.activation_bytes // max(self.num_calls, 1)


class Arena:
    """Graphs that share one pool of memory.

    passes     by their form; the first element of a form says whether it trains
    current    the last pass that began here; `key`: its form
    room       the most elements of inputs that its memory was made for
    """

    def __init__(self, device: GraphDevice) -> None:
        self.device = device
        self.passes: dict[Any, RecordedPass] = {}
        self.current: RecordedPass | None = None
        self.key: Any = None
        self.room = 0
        # Whether for passes that train, and for how many elements.
        self._made_for = False, 0

    def is_free(self) -> bool:
        """Return whether a pass may begin here."""
        return self.current is None or self.current.is_free()

    @property
    def holds_gradients(self) -> bool:
        """Return whether gradients lie where its graphs write."""
        return self.current is not None and self.current.holds_gradients

    def begin_recording(self, observed: ObservedMemory, *, trains: bool, size: int, largest: int) -> RecordedPass:
        """Return a pass to record, with inputs of this size; its memory is made for the largest one."""
        if len(self.passes) >= _MOST_FORMS:
            self.remove(min(self.passes, key=lambda key: self.passes[key].num_passes))
        made_for = trains, largest
        grows = made_for > self._made_for
        if grows:
            self._made_for, self.room = made_for, max(self.room, largest)
        self.device.begin_recordings(num_bytes=observed.scaled(largest / max(size, 1)).pass_bytes if grows else 0)
        return RecordedPass(self.device, places_gradients=observed.places_gradients)

    def remove(self, key: Any) -> None:
        """Destroy the graphs of one form."""
        self.device.settle()
        self.passes.pop(key).release()

    def release(self) -> None:
        """Destroy all graphs and give their memory back. The arena must be free."""
        recorded = [*self.passes.values(), *([self.current] if self.current is not None else [])]
        if recorded:
            self.device.settle()
            for one in recorded:
                one.release()
            self.device.renew()
        self.passes.clear()
        self.current = None
        self.room = 0
        self._made_for = False, 0


class Arenas:
    """The arenas of one model."""

    def __init__(self, make_device: Callable[[], GraphDevice]) -> None:
        self._make_device = make_device
        self.all = [Arena(make_device())]
        self._retired: list[Arena] = []

    @property
    def hold_graphs(self) -> bool:
        return any(arena.passes for arena in self.all)

    def room(self) -> int:
        """Return the size of inputs up to which graphs of passes that train have memory; 0 if there are none."""
        return max((arena.room for arena in self.all if any(key[0] for key in arena.passes)), default=0)

    def note_kept(self) -> None:
        """Note what is held of passes that are over; once that is copied, they are recorded again."""
        for arena in list(self.all):
            current = arena.current
            if current is not None and current.is_over() and not current.is_free() and current.note_kept():
                self.drop(arena)

    def free(self) -> Arena | None:
        """Return an arena in which a pass may begin, if there is one."""
        return next((arena for arena in self.all if arena.is_free()), None)

    def free_or_new(self) -> Arena | None:
        """Return a free arena, or another one; None if there are too many."""
        found = self.free()
        if found is None and len(self.all) < _MOST_ARENAS:
            found = Arena(self._make_device())
            self.all.append(found)
        return found

    def drop(self, arena: Arena) -> Arena:
        """Destroy an arena's graphs; return the arena to record in next.

        One whose memory is still needed, for a backward or by a tensor that somebody holds, is kept until it is not.
        """
        if arena.is_free():
            arena.release()
            return arena
        self._retired.append(arena)
        new = Arena(self._make_device())
        self.all[self.all.index(arena)] = new
        return new

    def release(self) -> None:
        """Destroy all graphs."""
        for arena in list(self.all):
            self.drop(arena)

    def release_retired(self) -> None:
        """Give the memory of retired arenas back, once it is no longer needed."""
        for arena in [arena for arena in self._retired if arena.is_free()]:
            arena.release()
            self._retired.remove(arena)
