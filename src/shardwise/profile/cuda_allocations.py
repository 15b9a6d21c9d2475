"""Allocations on a GPU over time, as the caching allocator itself has written them down.

The same questions as to live.LiveBytes, and better answers: the profiler misses what autograd's threads free between
two nodes of a graph, while the allocator sees every block, whichever thread gives it back. Sizes are those that were
asked for; `allocated` in torch's own counters is rounded up.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch

from shardwise.profile.memory_ledger import Allocation

_MOST_EVENTS = 2**23


class AllocatorHistory:
    """A recording; a moment of it is the number of an event. With `stacks`, the lines of code that asked as well."""

    def __init__(self, *, stacks: bool = False) -> None:
        self.allocations: list[Allocation] = []
        # As torch's viewer reads it.
        self.snapshot: dict[str, Any] = {}
        self._stacks = stacks
        # For each phase the (start, end) of its runs, in microseconds; and when each event was.
        self._phases: dict[str, list[tuple[int, int]]] = {}
        self._times: list[int] = []

    def __enter__(self) -> Self:
        context = "all" if self._stacks else None
        torch.cuda.memory._record_memory_history("all", context=context, stacks="python", max_entries=_MOST_EVENTS)
        return self

    def __exit__(self, *error: Any) -> None:
        torch.cuda.synchronize()
        self.snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        events = self.snapshot["device_traces"][torch.cuda.current_device()]
        self._times = [event["time_us"] for event in events]
        self.allocations = list(_allocations(events))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the recording that can be asked about; of several with one name, the last answers."""
        began = _now()
        yield
        self._phases.setdefault(name, []).append((began, _now()))

    def span(self, phase: str, *, run: int = -1) -> tuple[int, int]:
        """The moment at which a phase began, and the first one after it."""
        began, ended = self._phases[phase][run]
        return bisect_left(self._times, began), bisect_left(self._times, ended)


def _now() -> int:
    """The clock of the events."""
    return time.time_ns() // 1000


def _allocations(events: list[dict[str, Any]]) -> Iterator[Allocation]:
    """What was allocated, in the order in which it was freed; what never was comes last."""
    live: dict[int, tuple[int, int]] = {}
    for moment, event in enumerate(events):
        if event["action"] == "alloc":
            live[event["addr"]] = (moment, event["size"])
        elif event["action"] == "free_requested" and event["addr"] in live:
            born, size = live.pop(event["addr"])
            # Nothing happened in between: a kernel took it for itself.
            is_scratch = moment == born + 1
            yield Allocation(address=event["addr"], num_bytes=size, born=born, freed=moment, is_scratch=is_scratch)
    for address, (born, size) in live.items():
        yield Allocation(address=address, num_bytes=size, born=born)
