"""Copies of a state to host memory, made while training computes: the next update waits for them where it must.

On a CPU a thread copies. On a GPU a stream of its own does. Where the device has room, the state is first copied into a
buffer there, which has the layout of the data file (generation.py), so that the host gets it in one piece:

    staged      the update waits for nothing; costs the time of a copy on the device
    otherwise   the next update waits for the copies to the host
"""

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

# Left free on a device: other libraries allocate there, too.
_MARGIN_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySource:
    """Elements that go to `begin` and the bytes after it in a data file; `early` if the next forward changes them."""

    begin: int
    elements: Tensor
    early: bool

    @property
    def num_bytes(self) -> int:
        return self.elements.numel() * self.elements.element_size()

    @property
    def end(self) -> int:
        return self.begin + self.num_bytes

    def within(self, memory: Tensor) -> Tensor:
        """Return the place of the elements in a memory that has the layout of the data file."""
        return memory[self.begin : self.end].view(self.elements.dtype)


class Copying(Protocol):
    """Copies that have begun."""

    def finish(self) -> None:
        """Return when all bytes are in the data file. Called in a thread of its own."""
        ...

    def release_sources(self) -> None:
        """Return when the sources may be written; on a GPU, what is issued from now on may write them."""
        ...

    def lost_seconds(self, step_seconds: float) -> float:
        """Return how long the device did not compute because of them. Called after `finish`."""
        ...


class Copier:
    """Begins copies; on a GPU they have one stream, and one buffer if there is room for it."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._staging: Tensor | None = None

    @torch.no_grad()
    def begin(
        self,
        sources: Sequence[CopySource],
        *,
        memory: Tensor,
        numbers: Iterable[tuple[Tensor, Tensor]] = (),
    ) -> Copying:
        """Begin to copy.

        memory    the data file
        numbers   (host, device): small tensors that are copied as well
        """
        on_device = [source for source in sources if source.elements.is_cuda]
        on_host = [source for source in sources if not source.elements.is_cuda]
        for source in on_host:
            if source.early:
                source.within(memory).copy_(source.elements)
        host = _HostCopying([source for source in on_host if not source.early], memory=memory)
        if not on_device:
            return host
        device = on_device[0].elements.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        staging = self._room(memory.numel(), device=device)
        if staging is not None:
            copying = _Staged(on_device, memory=memory, staging=staging, stream=self._stream, numbers=numbers)
            return _Both(host, copying)
        straight = _Straight(on_device, memory=memory, stream=self._stream, numbers=numbers)
        return _Both(host, straight)

    def _room(self, num_bytes: int, *, device: torch.device) -> Tensor | None:
        """Return a buffer of this size on the device, kept from snapshot to snapshot; None without room for it."""
        if self._staging is None or self._staging.numel() != num_bytes:
            self._staging = None
            # What torch has cached does not count: the next step needs it again.
            free, _ = torch.cuda.mem_get_info(device)
            if free - _MARGIN_BYTES >= num_bytes:
                with suppress(torch.OutOfMemoryError):
                    self._staging = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return self._staging


class _HostCopying:
    """Copies from host memory, made by the thread that calls `finish`."""

    def __init__(self, sources: Sequence[CopySource], *, memory: Tensor) -> None:
        self._pairs = [(source.within(memory), source.elements) for source in sources]
        self._copied = threading.Event()

    @torch.no_grad()
    def finish(self) -> None:
        try:
            for target, elements in self._pairs:
                target.copy_(elements)
        finally:
            self._pairs.clear()
            self._copied.set()

    def release_sources(self) -> None:
        self._copied.wait()

    def lost_seconds(self, step_seconds: float) -> float:
        return 0.0


class _Staged:
    """Copies on the device, then to the host from there."""

    def __init__(
        self,
        sources: Sequence[CopySource],
        *,
        memory: Tensor,
        staging: Tensor,
        stream: torch.cuda.Stream,
        numbers: Iterable[tuple[Tensor, Tensor]],
    ) -> None:
        current = torch.cuda.current_stream(stream.device)
        self._begun = current.record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        by_dtype = sorted(sources, key=lambda source: str(source.elements.dtype))
        for _, alike in groupby(by_dtype, key=lambda source: source.elements.dtype):
            group = list(alike)
            torch._foreach_copy_([source.within(staging) for source in group], [source.elements for source in group])
        self._staged = current.record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        stream.wait_event(self._staged)
        self._numbers = list(numbers)
        with torch.cuda.stream(stream):
            for begin, end in _ranges(sources):
                memory[begin:end].copy_(staging[begin:end], non_blocking=True)
            for target, number in self._numbers:
                target.copy_(number, non_blocking=True)
        self._copied = stream.record_event()

    def finish(self) -> None:
        self._copied.synchronize()
        self._numbers.clear()

    def release_sources(self) -> None:
        # The copies on the device were issued before whatever comes now.
        pass

    def lost_seconds(self, step_seconds: float) -> float:
        return float(self._begun.elapsed_time(self._staged)) / 1000


class _Straight:
    """Copies from the state to the host."""

    def __init__(
        self,
        sources: Sequence[CopySource],
        *,
        memory: Tensor,
        stream: torch.cuda.Stream,
        numbers: Iterable[tuple[Tensor, Tensor]],
    ) -> None:
        self._device = stream.device
        current = torch.cuda.current_stream(self._device)
        # Kept until the copies are made: the allocator would give their memory to the next step.
        self._held = [source.elements.clone() if source.early else source.elements for source in sources]
        self._numbers = list(numbers)
        stream.wait_stream(current)
        self._begun = stream.record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for source, elements in zip(sources, self._held, strict=True):
                source.within(memory).copy_(elements, non_blocking=True)
            for target, number in self._numbers:
                target.copy_(number, non_blocking=True)
        self._copied = stream.record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        self._copied.synchronize()
        self._held.clear()
        self._numbers.clear()

    def release_sources(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied)

    def lost_seconds(self, step_seconds: float) -> float:
        seconds = float(self._begun.elapsed_time(self._copied)) / 1000
        return max(0.0, seconds - step_seconds)


class _Both:
    """Copies from the host and from a device."""

    def __init__(self, host: _HostCopying, device: _Staged | _Straight) -> None:
        self._host, self._device = host, device

    def finish(self) -> None:
        self._host.finish()
        self._device.finish()

    def release_sources(self) -> None:
        self._host.release_sources()
        self._device.release_sources()

    def lost_seconds(self, step_seconds: float) -> float:
        return self._device.lost_seconds(step_seconds)


def _ranges(sources: Sequence[CopySource]) -> list[tuple[int, int]]:
    """Return the parts of the data file that the sources fill, each as long as no other piece lies between."""
    found: list[tuple[int, int]] = []
    for source in sorted(sources, key=lambda source: source.begin):
        # The zeros between two pieces are shorter than 64 bytes.
        if found and source.begin - found[-1][1] < 64:
            found[-1] = found[-1][0], source.end
        else:
            found.append((source.begin, source.end))
    return found


def pin(memory: Tensor) -> bool:
    """Let the device copy straight into mapped memory; return False if the driver refuses, where copies are slower."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)) == 0:  # type: ignore[no-untyped-call]
        return True
    # The next launch of a kernel would report the error as its own.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def unpin(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
