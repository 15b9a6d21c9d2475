"""A pool of the caching allocator's memory, for graphs and for ordinary steps."""

import os
from contextlib import suppress

import torch

from shardwise.torch_internals import torch_private
from shardwise.vocabulary.segments import fixed_segments, segments_expand

Block = tuple[int, int]
"""Start and end address of a block in use."""


def why_no_pool() -> str:
    """Return why this process cannot have a pool; "" if it can."""
    backend = torch.cuda.get_allocator_backend()
    return "" if backend == "native" else f"torch's allocator is {backend}, not its own (native)"


def fix_segments() -> None:
    """Let no further segment of the allocator expand, before the first pool is made.

    torch 2.11 loses count of what it maps in a pool: empty_cache fails, or destroys a pool in which tensors still lie.
    """
    if segments_expand(os.environ):
        torch_private.set_allocator_settings(fixed_segments(os.environ))


class StepPool:
    """Between `begin` and `end`, all threads allocate in the pool what they allocate on the stream.

    torch.cuda.use_mem_pool would not cover the allocations of autograd's thread, which are most of a backward. And a
    torch.cuda.MemPool returns its memory when it is collected, even during a capture.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._device = stream.device_index
        self.is_filled = False
        self._open()

    def _open(self) -> None:
        fix_segments()
        # Unused blocks of the allocator cannot be used in the pool.
        torch.cuda.empty_cache()
        self.id = torch.cuda.graph_pool_handle()
        # A pool ends with its last graph. This one is never replayed, and keeps the pool alive.
        self._anchor = torch.cuda.CUDAGraph()
        place = torch.zeros((), device=self._stream.device)
        with torch.cuda.stream(self._stream):
            self._anchor.capture_begin(pool=self.id, capture_error_mode="thread_local")
            place.zero_()
            self._anchor.capture_end()

    def begin(self) -> None:
        if not self.is_filled:
            with torch.cuda.stream(self._stream):
                torch_private.begin_allocate_stream_to_pool(self._device, self.id)
            self.is_filled = True

    def end(self) -> None:
        if self.is_filled:
            self._end()
            self.is_filled = False

    def _end(self) -> None:
        torch_private.end_allocate_to_pool(self._device, self.id)
        torch_private.release_pool(self._device, self.id)

    def abort(self) -> None:
        """End the use of the pool after a failed capture, which not all versions of torch do."""
        # Raised where torch has ended it.
        with suppress(RuntimeError):
            self._end()

    def blocks(self, *, settled: bool = False) -> set[Block]:
        """Return the blocks in use; `settled`: the device is idle, so blocks that wait for an event are free."""
        free = ("inactive", "active_pending_free") if settled else ("inactive",)
        found = set()
        for segment in torch.cuda.memory_snapshot(self.id):  # type: ignore[no-untyped-call]
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] not in free:
                    found.add((address, address + block["size"]))
                address += block["size"]
        return found

    def renew(self) -> None:
        """Replace the pool, when it has no graph left. Unused memory of the old one returns to the device."""
        self._anchor.reset()
        self._open()
