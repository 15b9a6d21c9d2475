"""A pool of the caching allocator's memory, for graphs and for ordinary steps."""

from contextlib import suppress

import torch

Block = tuple[int, int]
"""Where memory that is in use begins and ends."""


def why_no_pool() -> str:
    """Why this process cannot have one, in a line; "" if it can."""
    backend = torch.cuda.get_allocator_backend()
    return "" if backend == "native" else f"torch's allocator is {backend}, not its own (native)"


class StepPool:
    """Between `begin` and `end`, what any thread allocates on the stream lies in the pool.

    torch.cuda.use_mem_pool would leave out what autograd's own thread allocates, which is most of a backward. And a
    torch.cuda.MemPool gives its memory back in the moment in which it is collected, whatever is captured just then.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._device = stream.device_index
        self.is_filled = False
        self._open()

    def _open(self) -> None:
        # What the allocator keeps besides cannot be used in here.
        torch.cuda.empty_cache()
        self.id = torch.cuda.graph_pool_handle()
        # A pool goes with its last graph, and cannot be used again. It has one that stays, and is never replayed.
        self._anchor = torch.cuda.CUDAGraph()
        place = torch.zeros((), device=self._stream.device)
        with torch.cuda.stream(self._stream):
            self._anchor.capture_begin(pool=self.id, capture_error_mode="thread_local")
            place.zero_()
            self._anchor.capture_end()

    def begin(self) -> None:
        if not self.is_filled:
            with torch.cuda.stream(self._stream):
                torch._C._cuda_beginAllocateCurrentStreamToPool(self._device, self.id)
            self.is_filled = True

    def end(self) -> None:
        if self.is_filled:
            self._end()
            self.is_filled = False

    def _end(self) -> None:
        torch._C._cuda_endAllocateToPool(self._device, self.id)
        torch._C._cuda_releasePool(self._device, self.id)

    def break_off(self) -> None:
        """A capture into the pool has failed, and its graph is gone. Not all versions of torch end its use then."""
        # It is not in use where torch has.
        with suppress(RuntimeError):
            self._end()

    def blocks(self, *, settled: bool = False) -> set[Block]:
        """The blocks in use; with `settled` the device is idle, and none is in use that nobody holds."""
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
        """Another pool in its place; no graph may be left. What nobody holds in the old one goes back to the device."""
        self._anchor.reset()
        self._open()
