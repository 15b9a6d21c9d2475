"""A pool of the caching allocator's memory, for graphs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from shardwise.base.torch_internals import torch_private
from shardwise.base.vocabulary.segments import fixed_segments, segments_expand


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


class GraphPool:
    """A pool of graphs that are recorded on one stream.

    A torch.cuda.MemPool would return its memory when it is collected, even during a capture.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._device = stream.device_index
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

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Allocate on the pool's stream in this block, and in the pool: blocks of it belong to a stream."""
        with torch.cuda.stream(self._stream):
            torch_private.begin_allocate_stream_to_pool(self._device, self.id)
            try:
                yield
            finally:
                self._end()

    def _end(self) -> None:
        torch_private.end_allocate_to_pool(self._device, self.id)
        torch_private.release_pool(self._device, self.id)

    def abort(self) -> None:
        """End the use of the pool after a failed capture, which not all versions of torch do."""
        # Raised where torch has ended it.
        with suppress(RuntimeError):
            self._end()

    def renew(self) -> None:
        """Replace the pool, when it has no graph left. Unused memory of the old one returns to the device."""
        self._anchor.reset()
        self._open()
