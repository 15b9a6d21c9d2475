"""Bytes of live CPU tensors over time, as torch's own allocator reports them to the profiler. Not RSS.

    with LiveBytes() as live:
        model = make()
        with live.phase("step"):
            train()
    live.peak_bytes("step"), live.end_bytes("step")

What was allocated before the recording is not seen, so it has to start before the first tensor of interest. The
profiler follows this thread only: what a backend's thread allocates is not seen either, and what such a thread
frees is noticed only when its address is given out again. `end_bytes` of two equal steps tells whether that matters.

python benchmarks/live_bytes.py     checks it against a known pattern of allocations
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "live_bytes/"


class LiveBytes:
    """A recording; the questions are answered when it is over."""

    def __init__(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        # (time, live bytes from then on), and for each phase the (start, end) of its runs.
        self._timeline: list[tuple[int, int]] = []
        self._phases: dict[str, list[tuple[int, int]]] = {}

    def __enter__(self) -> Self:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        kineto = self._profile.profiler.kineto_results
        self._read(sorted(_flatten(kineto.experimental_event_tree()), key=lambda event: event.start_time_ns))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the recording that can be asked about; of several with one name, the last answers."""
        with record_function(_MARK + name):
            yield

    def peak_bytes(self, phase: str, *, run: int = -1) -> int:
        """The most bytes that were live at once in the phase, what was there before it included."""
        start, end = self._phases[phase][run]
        inside = [live for time, live in self._timeline if start <= time <= end]
        return max([self._live_at(start), *inside])

    def end_bytes(self, phase: str, *, run: int = -1) -> int:
        """The bytes that were live when the phase ended."""
        return self._live_at(self._phases[phase][run][1])

    def _live_at(self, moment: int) -> int:
        return next((live for time, live in reversed(self._timeline) if time <= moment), 0)

    def _read(self, events: Iterable[Any]) -> None:
        sizes: dict[int, int] = {}
        total = 0
        for event in events:
            if event.name.startswith(_MARK):
                span = (event.start_time_ns, event.end_time_ns)
                self._phases.setdefault(event.name.removeprefix(_MARK), []).append(span)
            elif event.name == "[memory]" and event.extra_fields.device.type == "cpu":
                # An address that is given out again was freed before, on a thread that is not followed.
                address, num_bytes = event.extra_fields.ptr, event.extra_fields.alloc_size
                total -= sizes.pop(address, 0)
                if num_bytes > 0:
                    sizes[address] = num_bytes
                    total += num_bytes
                self._timeline.append((event.start_time_ns, total))


def _flatten(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _flatten(event.children)


def _check() -> None:
    """Blocks of known sizes, freed in every way that a block can be."""
    with LiveBytes() as live:
        kept = torch.zeros(1000)  # 4000 bytes
        with live.phase("step"):
            first = torch.zeros(500)  # + 2000
            second = torch.zeros(250, dtype=torch.float64)  # + 2000: the peak
            del first
            second.untyped_storage().resize_(0)
            second.untyped_storage().resize_(1600)
        with live.phase("rest"):
            second.untyped_storage().resize_(0)
        del kept
        with live.phase("end"):
            pass
    found = [live.peak_bytes("step"), live.end_bytes("step"), live.end_bytes("rest"), live.end_bytes("end")]
    assert found == [8000, 5600, 4000, 0], found
    print("live_bytes: as it should be")


if __name__ == "__main__":
    _check()
