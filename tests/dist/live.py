"""Bytes of live CPU tensors over a step, without what a kernel takes for itself while it runs."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwise.comm.groups import Group

_PATH = Path(__file__).parents[2] / "benchmarks" / "live_bytes.py"
_spec = importlib.util.spec_from_file_location("live_bytes", _PATH)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)


class LiveTensors(_module.LiveBytes):  # type: ignore[misc, name-defined]
    """What is allocated and freed again with no operation between is the kernel's own, and is not counted.

    On a CPU that is oneDNN's business: which kernel it takes, and what that needs, depends on the processor.
    """

    def __exit__(self, *error: Any) -> None:
        # The events as the profiler would show them; making those takes longer than a step, and nobody looks.
        self._profile.profiler._parse_kineto_results = lambda *results, **options: []
        super().__exit__(*error)

    def _read(self, events: Iterable[Any]) -> None:
        events = list(events)
        since_operation: dict[int, int] = {}
        dropped: set[int] = set()
        for index, event in enumerate(events):
            if event.name != "[memory]":
                since_operation.clear()
            elif event.extra_fields.alloc_size > 0:
                since_operation[event.extra_fields.ptr] = index
            elif event.extra_fields.ptr in since_operation:
                dropped |= {index, since_operation.pop(event.extra_fields.ptr)}
        super()._read(event for index, event in enumerate(events) if index not in dropped)


class Done:
    """Work that is over."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Silent:
    """Collectives that do nothing: the same memory, and no thread of a backend that frees some of it unseen."""

    def all_gather(self, buffer: Tensor, *, group: Group) -> Done:
        return Done()

    def reduce_scatter(self, buffer: Tensor, *, group: Group) -> Done:
        return Done()

    def all_reduce(self, buffer: Tensor, *, group: Group) -> Done:
        return Done()

    def broadcast(self, buffer: Tensor, *, source: int, group: Group) -> Done:
        return Done()
