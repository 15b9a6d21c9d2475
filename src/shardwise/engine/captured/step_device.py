"""The device that a step runs on, as far as capturing is concerned."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.engine.captured.reads import source_line
from shardwise.vocabulary.quantities import bytes_text

_WAITS = "called a synchronizing CUDA operation"
_PROTOTYPE = "Synchronization debug mode"
# What the driver keeps of the graphs of a step.
_GRAPH_BYTES = 256 * 2**20


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
        caller = self.enter_stream()
        try:
            yield
        finally:
            self.leave_stream(caller)

    def enter_stream(self) -> torch.cuda.Stream:
        """From here on, on the stream that captures; the one of before."""
        caller = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(caller)
        torch.cuda.set_stream(self.stream)
        return caller

    def leave_stream(self, caller: torch.cuda.Stream) -> None:
        torch.cuda.set_stream(caller)
        caller.wait_stream(self.stream)

    def random_offset(self) -> int:
        """How many random numbers were drawn on the device."""
        return self._generator.get_offset()

    def settled_seconds(self) -> float:
        """The time, when all that was issued is done."""
        self.settle()
        return time.perf_counter()

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

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
        self.settle()
        torch.cuda.empty_cache()

    def free_share(self) -> float:
        """How much of the device's memory is free."""
        free_bytes, device_bytes = torch.cuda.mem_get_info(self.device)
        return free_bytes / device_bytes

    def lacks_memory(self) -> str:
        """Whether what the driver keeps of graphs could be too much for the device: a line; "" if there is room.

        Their tensors need no room: they lie in memory that ordinary steps use, or that is given back before.
        """
        self.release_memory()
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        if free_bytes >= _GRAPH_BYTES:
            return ""
        return f"graphs take up to {bytes_text(_GRAPH_BYTES)} of the device, and {bytes_text(free_bytes)} are free"
