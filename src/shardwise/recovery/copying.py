"""Copies of tensors to host memory, made while training computes: the next update waits for them where it must.

On a CPU a thread copies. On a GPU a stream of its own does: from a second copy on the device if there is memory for
one, else straight from the state.
"""

import threading
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Copying(Protocol):
    """Copies that have begun."""

    def finish(self) -> None:
        """Return when all bytes are in the targets. Called in a thread of its own."""
        ...

    def release_sources(self) -> None:
        """Return when the sources may be written; on a GPU, what is issued from now on may write them."""
        ...


class Copier:
    """Begins copies; on a GPU they have one stream."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def begin(self, targets: Sequence[Tensor], sources: Sequence[Tensor], *, captured: bool) -> Copying:
        """Begin to copy; `captured`: updates are part of CUDA graphs, which cannot wait for a copy."""
        device = next((source.device for source in sources if source.is_cuda), None)
        if device is None:
            return _HostCopying(targets, sources)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _DeviceCopying(targets, sources, stream=self._stream, captured=captured)


class _HostCopying:
    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self._pairs = list(zip(targets, sources, strict=True))
        self._copied = threading.Event()

    @torch.no_grad()
    def finish(self) -> None:
        try:
            for target, source in self._pairs:
                target.copy_(source)
        finally:
            self._pairs.clear()
            self._copied.set()

    def release_sources(self) -> None:
        self._copied.wait()


class _DeviceCopying:
    @torch.no_grad()
    def __init__(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], *, stream: torch.cuda.Stream, captured: bool
    ) -> None:
        self._device = device = stream.device
        current = torch.cuda.current_stream(device)
        on_device = [source for source in sources if source.is_cuda]
        num_bytes = sum(source.numel() * source.element_size() for source in on_device)
        # Kept until the copies are made: the allocator would give their memory to the next step.
        self._held: list[Tensor] = list(sources)
        self._staged = _free_bytes(device) > 2 * num_bytes
        if self._staged:
            sources = [source.clone() if source.is_cuda else source for source in sources]
            self._held += sources
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=source.is_cuda)
        self._copied = stream.record_event()
        if captured and not self._staged:
            current.wait_event(self._copied)

    def finish(self) -> None:
        self._copied.synchronize()
        self._held.clear()

    def release_sources(self) -> None:
        if not self._staged:
            torch.cuda.current_stream(self._device).wait_event(self._copied)


def _free_bytes(device: torch.device) -> int:
    """Return the memory that can be allocated: free on the device, or cached by torch and not in use."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def pin(memory: Tensor) -> bool:
    """Let the device copy straight into mapped memory; return False if the driver refuses, where copies are slower."""
    return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0  # type: ignore[no-untyped-call]


def unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
