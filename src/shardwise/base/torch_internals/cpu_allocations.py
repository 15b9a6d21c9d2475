"""Records the allocations of tensors on a CPU over time, as torch's allocator reports them to the profiler. Not RSS.

    with LiveBytes() as live:
        model = make()
        with live.phase("step"):
            train()
    live.peak_bytes("step"), live.end_bytes("step")

Start the recording before the first tensor of interest: earlier allocations are not seen. The profiler follows this
thread and autograd's. It does not see what a backend's thread allocates, and notices what such a thread frees only when
the address is used again. If `end_bytes` of two equal steps agree, this does not matter.
"""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Self

from torch.profiler import ProfilerActivity, profile, record_function

from shardwise.base.torch_internals import torch_private
from shardwise.base.vocabulary.allocation import FOREVER, Allocation

_MARK = "shardwise/"
_LOG_LEVEL = "KINETO_LOG_LEVEL"


class LiveBytes:
    """A recording, to be read after its end. A moment is the number of an event.

    Without `with_scratch`, the scratch memory of kernels is left out: it is oneDNN's, and depends on the processor.
    """

    def __init__(self, *, with_scratch: bool = True) -> None:
        self.allocations: list[Allocation] = []
        self._with_scratch = with_scratch
        self._profile: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        # Phase → (start, end) of each of its runs.
        self._phases: dict[str, list[tuple[int, int]]] = {}
        # The moments of all changes, and the live bytes after each.
        self._moments: list[int] = []
        self._totals: list[int] = []

    def __enter__(self) -> Self:
        with _without_log():
            self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        # Skips building the events that the profiler would show, which takes longer than a step.
        before = torch_private.replace("parse_kineto_results", lambda *results, **options: [])
        try:
            self._profile.__exit__(*error)
        finally:
            torch_private.replace("parse_kineto_results", before)
        tree = self._profile.profiler.kineto_results.experimental_event_tree()
        self._read(sorted(_flatten(tree), key=lambda event: event.start_time_ns))
        # Frees hundreds of thousands of events.
        self._profile = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a part of the recording; of several runs with one name, the last is the default."""
        with record_function(_MARK + name):
            yield

    def span(self, phase: str, *, run: int = -1) -> tuple[int, int]:
        """Return the moment at which a phase began, and the first one after it."""
        return self._phases[phase][run]

    def peak_bytes(self, phase: str, *, run: int = -1) -> int:
        """Return the most bytes that were live at once in the phase, earlier allocations included."""
        start, end = self.span(phase, run=run)
        inside = self._totals[bisect_left(self._moments, start) : bisect_left(self._moments, end)]
        return max([self._live_before(start), *inside])

    def end_bytes(self, phase: str, *, run: int = -1) -> int:
        """Return the bytes that were live when the phase ended."""
        return self._live_before(self.span(phase, run=run)[1])

    def _live_before(self, moment: int) -> int:
        position = bisect_left(self._moments, moment)
        return self._totals[position - 1] if position else 0

    def _read(self, events: Sequence[Any]) -> None:
        found = _allocations(events)
        self.allocations = [one for one in found if self._with_scratch or not one.is_scratch]
        times = [event.start_time_ns for event in events]
        for moment, event in enumerate(events):
            if event.name.startswith(_MARK):
                span = (moment, bisect_right(times, event.end_time_ns))
                self._phases.setdefault(event.name.removeprefix(_MARK), []).append(span)
        changes = [(one.born, one.num_bytes) for one in self.allocations]
        changes += [(one.freed, -one.num_bytes) for one in self.allocations if one.freed != FOREVER]
        changes.sort()
        self._moments = [moment for moment, _ in changes]
        self._totals = list(accumulate(num_bytes for _, num_bytes in changes))


@contextmanager
def _without_log() -> Iterator[None]:
    """Silence the profiler's library, which otherwise logs each start and stop to standard error."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]


def _flatten(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _flatten(event.children)


def _allocations(events: Sequence[Any]) -> Iterator[Allocation]:
    """Yield allocations in the order in which they were freed; those never freed come last."""
    live: dict[int, tuple[int, int, int]] = {}
    # An allocation that is freed before the next operation begins was a kernel's scratch memory.
    last_operation = 0
    for moment, event in enumerate(events):
        if event.name != "[memory]":
            last_operation = moment
        elif event.extra_fields.device.type == "cpu":
            address, num_bytes = event.extra_fields.ptr, event.extra_fields.alloc_size
            # An address that is used again was freed before, perhaps on a thread that is not followed.
            if address in live:
                born, size, kernel_end_ns = live.pop(address)
                in_kernel = born > last_operation or event.start_time_ns < kernel_end_ns
                is_scratch = in_kernel and num_bytes <= 0
                yield Allocation(address=address, num_bytes=size, born=born, freed=moment, is_scratch=is_scratch)
            if num_bytes > 0:
                live[address] = (moment, num_bytes, _kernel_end_ns(event))
    for address, (born, size, _) in live.items():
        yield Allocation(address=address, num_bytes=size, born=born)


def _kernel_end_ns(allocation: Any) -> int:
    """Return the end of the kernel that allocates: what is freed before then was its scratch memory.

    oneDNN copies tensors into its own layouts there, which depend on the processor.
    """
    parent = allocation.parent
    return int(parent.end_time_ns) if parent is not None and parent.name.startswith("aten::") else 0
