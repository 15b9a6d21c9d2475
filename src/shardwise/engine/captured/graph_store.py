"""The graphs of a step by key, with their statistics. The least recently used graph is evicted when there are too many.

Graphs are numbered in the order of their capture, which is the same on all ranks, so a number means the same graph on
each of them; keys are local to a rank. A key has several graphs if its steps do not always read the same values.
"""

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from shardwise.engine.captured.probed_step import StepProbe
from shardwise.engine.captured.step_key import StepKey
from shardwise.engine.graphs.reads import Read

MOST_GRAPHS = 8
MOST_GRAPHS_OF_A_KEY = 3
# The largest share of a key's steps in which its guards may fail, after the first _FEW steps.
MOST_FAILURES = 0.05
_FEW = 20
# The largest share of undone replays, which cost as much as others.
MOST_WASTED = 0.25


class Recorded(Protocol):
    """A captured step (step_graphs.py)."""

    def release(self) -> None: ...


GraphT = TypeVar("GraphT", bound=Recorded)


@dataclass(slots=True, kw_only=True)
class StoredGraph(Generic[GraphT]):
    """A graph, and the reads that it assumes."""

    number: int
    reads: tuple[Read, ...]
    graph: GraphT
    used: int = 0


@dataclass(slots=True, kw_only=True)
class KeyHistory(Generic[GraphT]):
    """The steps of one key, and its graphs: the one whose guards held last is in front."""

    key: StepKey
    # Observations of the last ordinary step.
    probe: StepProbe | None = None
    num_ordinary: int = 0
    num_captured: int = 0
    # Steps in which the guards of the first graph failed, and steps in which those of all graphs that were tried did.
    num_wasted: int = 0
    num_unfit: int = 0
    graphs: list[StoredGraph[GraphT]] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Steps that began with a replay."""
        return self.num_captured + self.num_unfit

    def wants_another(self) -> bool:
        """Return whether a step for which the guards of all graphs failed should get another graph."""
        if len(self.graphs) >= MOST_GRAPHS_OF_A_KEY:
            return False
        return self.num_unfit > 1 and self.num_unfit > MOST_FAILURES * self.num_steps

    def why_not(self) -> str:
        """Return why this key should no longer be captured; "" if it should."""
        if self.num_steps < _FEW:
            return ""
        if self.num_unfit > MOST_FAILURES * self.num_steps and len(self.graphs) >= MOST_GRAPHS_OF_A_KEY:
            return f"the values that the step looks at changed in {self.num_unfit} of {self.num_steps} steps"
        if self.num_wasted > MOST_WASTED * self.num_steps:
            return f"{self.num_wasted} of {self.num_steps} replays were thrown away"
        return ""


class GraphStore(Generic[GraphT]):
    """All keys and graphs: at most `limit` graphs, the least recently used one is evicted."""

    def __init__(self, *, limit: int = MOST_GRAPHS) -> None:
        self.limit = limit
        self.histories: list[KeyHistory[GraphT]] = []
        self._next = 0
        self._clock = 0

    def find(self, key: StepKey) -> KeyHistory[GraphT]:
        """Return the history of a key; a new one for a new key."""
        for history in self.histories:
            if history.key == key:
                return history
        history = KeyHistory(key=key)
        self.histories.append(history)
        # Bounds the number of keys that were never captured.
        without = [other for other in self.histories if not other.graphs]
        if len(without) > 4 * self.limit:
            self.histories.remove(without[0])
        return history

    def add(self, history: KeyHistory[GraphT], *, reads: tuple[Read, ...], graph: GraphT) -> StoredGraph[GraphT]:
        stored = StoredGraph(number=self._next, reads=reads, graph=graph)
        self._next += 1
        history.graphs.insert(0, stored)
        self.use(history, stored)
        while sum(len(other.graphs) for other in self.histories) > self.limit:
            self._evict()
        return stored

    def use(self, history: KeyHistory[GraphT], stored: StoredGraph[GraphT]) -> None:
        """Move a graph whose guards held to the front: it is tried first next time."""
        self._clock += 1
        stored.used = self._clock
        history.graphs.remove(stored)
        history.graphs.insert(0, stored)

    def _evict(self) -> None:
        held = [(stored.used, stored.number, history) for history in self.histories for stored in history.graphs]
        _, number, history = min(held, key=lambda found: found[:2])
        (stored,) = [stored for stored in history.graphs if stored.number == number]
        history.graphs.remove(stored)
        stored.graph.release()

    def drop_graphs(self) -> None:
        """Release all graphs."""
        for history in self.histories:
            for stored in history.graphs:
                stored.graph.release()
            history.graphs.clear()

    def clear(self) -> None:
        """Release all graphs, and forget all keys."""
        self.drop_graphs()
        self.histories.clear()

    @property
    def num_graphs(self) -> int:
        return sum(len(history.graphs) for history in self.histories)
