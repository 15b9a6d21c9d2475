"""Records the allocations on a GPU over time, from the history of the caching allocator.

It has the interface of cpu_allocations.LiveBytes and misses nothing: the profiler does not see what autograd's threads
free between two nodes of a graph, while the allocator sees every block. Sizes are the requested ones; torch's counters
round them up.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch

from shardwise.base.torch_internals import torch_private
from shardwise.base.vocabulary.allocation import Allocation

_MOST_EVENTS = 2**23


class AllocatorHistory:
    """A recording. A moment is the number of an event. `stacks`: also record the lines of code that allocate."""

    def __init__(self, *, stacks: bool = False) -> None:
        self.allocations: list[Allocation] = []
        # In the format of torch's viewer.
        self.snapshot: dict[str, Any] = {}
        self._stacks = stacks
        # Phase → (start, end) of each of its runs, and the time of each event, in microseconds.
        self._phases: dict[str, list[tuple[int, int]]] = {}
        self._times: list[int] = []

    def __enter__(self) -> Self:
        context = "all" if self._stacks else None
        record = torch_private.record_memory_history
        record(enabled="all", context=context, stacks="python", max_entries=_MOST_EVENTS)
        return self

    def __exit__(self, *error: Any) -> None:
        torch.cuda.synchronize()
        self.snapshot = torch_private.memory_snapshot()
        torch_private.record_memory_history(enabled=None)
        events = self.snapshot["device_traces"][torch.cuda.current_device()]
        self._times = [event["time_us"] for event in events]
        self.allocations = list(_allocations(events))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a part of the recording; of several runs with one name, the last is the default."""
        began = _now()
        yield
        self._phases.setdefault(name, []).append((began, _now()))

    def span(self, phase: str, *, run: int = -1) -> tuple[int, int]:
        """Return the moment at which a phase began, and the first one after it."""
        began, ended = self._phases[phase][run]
        return bisect_left(self._times, began), bisect_left(self._times, ended)


def _now() -> int:
    """Read the clock of the events."""
    return time.time_ns() // 1000


def _allocations(events: list[dict[str, Any]]) -> Iterator[Allocation]:
    """Yield allocations in the order in which they were freed; those never freed come last."""
    live: dict[int, tuple[int, int]] = {}
    for moment, event in enumerate(events):
        if event["action"] == "alloc":
            live[event["addr"]] = (moment, event["size"])
        elif event["action"] == "free_requested" and event["addr"] in live:
            born, size = live.pop(event["addr"])
            # No other event in between: a kernel's scratch memory.
            is_scratch = moment == born + 1
            yield Allocation(address=event["addr"], num_bytes=size, born=born, freed=moment, is_scratch=is_scratch)
    for address, (born, size) in live.items():
        yield Allocation(address=address, num_bytes=size, born=born)
