"""The device that a step runs on, as far as capturing is concerned."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.engine.captured.reads import source_line
from shardwise.quantities import bytes_text

_WAITS = "called a synchronizing CUDA operation"
_PROTOTYPE = "Synchronization debug mode"
# A graph's blocks do not fit as tightly as those of ordinary steps.
_ROOM = 1.1
# The share of the device's memory that graphs leave to others, such as an evaluation.
_LEFT = 0.05


class StepDevice:
    """A CUDA device and the stream on which its steps run and are captured."""

    type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._generator = torch.cuda.default_generators[self.stream.device_index]

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """On the stream that captures: autograd remembers on which stream it gave a parameter its gradient."""
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            yield
        current.wait_stream(self.stream)

    def random_offset(self) -> int:
        """How many random numbers were drawn on the device."""
        return self._generator.get_offset()

    def settled_seconds(self) -> float:
        """The time, when all that was issued is done."""
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def noting_waits(self) -> Iterator[list[str]]:
        """The lines of source that wait for the device in here, filled in at the end; other warnings are passed on."""
        waits: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield waits
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        for warning in caught:
            text = str(warning.message)
            if text.startswith(_WAITS):
                # A checkpoint is written by a thread of its own.
                if "/shardwise/checkpoint/" not in warning.filename:
                    waits.append(source_line(warning.filename, warning.lineno))
            elif not text.startswith(_PROTOTYPE):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    def release_memory(self) -> None:
        """Give back what the allocator keeps and nothing lies in."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def lacks_memory(self) -> str:
        """Whether graphs beside ordinary steps could be too much for the device: a line; "" if there is room.

        What ordinary steps need is at most what the allocator has reserved beyond what is held between steps.
        """
        free_bytes, device_bytes = torch.cuda.mem_get_info(self.device)
        reserved, held = torch.cuda.memory_reserved(self.device), torch.cuda.memory_allocated(self.device)
        graph_bytes = _ROOM * (reserved - held)
        if free_bytes >= graph_bytes + _LEFT * device_bytes:
            return ""
        return (
            f"graphs could take {bytes_text(graph_bytes)} besides what ordinary steps take, and "
            f"{bytes_text(free_bytes)} are free"
        )
