"""The device of captured steps: its stream, its generator, its free memory, and waits for it."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.engine.graphs.reads import source_line
from shardwise.vocabulary.quantities import bytes_text

_WAITS = "called a synchronizing CUDA operation"
_PROTOTYPE = "Synchronization debug mode"
# A device counts as full if less than this share of its memory is free.
FULL = 0.1
# Memory that the driver uses for the graphs of a step.
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
        """Run on the stream that captures: autograd remembers on which stream it gave a parameter its gradient."""
        caller = self.enter_stream()
        try:
            yield
        finally:
            self.leave_stream(caller)

    def enter_stream(self) -> torch.cuda.Stream:
        """Make the stream that captures the current one; return the previous one."""
        caller = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(caller)
        torch.cuda.set_stream(self.stream)
        return caller

    def leave_stream(self, caller: torch.cuda.Stream) -> None:
        torch.cuda.set_stream(caller)
        caller.wait_stream(self.stream)

    def random_offset(self) -> int:
        """Return the offset of the device's random generator: how many numbers were drawn."""
        return self._generator.get_offset()

    def settled_seconds(self) -> float:
        """Wait for the device; return the time."""
        self.settle()
        return time.perf_counter()

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    @contextmanager
    def noting_waits(self) -> Iterator[list[str]]:
        """Collect the lines of source that wait for the device, at the end of the block; pass other warnings on."""
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
                # A checkpoint is written by another thread.
                if "/shardwise/checkpoint/" not in warning.filename:
                    waits.append(source_line(warning.filename, warning.lineno))
            elif not text.startswith(_PROTOTYPE):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)

    def release_memory(self) -> None:
        """Return unused memory of the caching allocator to the device."""
        self.settle()
        torch.cuda.empty_cache()

    def free_share(self) -> float:
        """Return the share of the device's memory that is free."""
        free_bytes, device_bytes = torch.cuda.mem_get_info(self.device)
        return free_bytes / device_bytes

    def lacks_memory(self) -> str:
        """Return why the device may be too full for the driver's data of graphs; "" if there is room.

        Their tensors need no further memory: they use that of ordinary steps.
        """
        if torch.cuda.mem_get_info(self.device)[0] < _GRAPH_BYTES:
            self.release_memory()
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        if free_bytes >= _GRAPH_BYTES:
            return ""
        return f"graphs take up to {bytes_text(_GRAPH_BYTES)} of the device, and {bytes_text(free_bytes)} are free"
