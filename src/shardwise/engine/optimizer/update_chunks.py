"""The parts of an update that passes through the device: chunks of a flat's slice, memory for them, and streams."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.core.master import Owned


@dataclass(slots=True)
class Piece:
    """The elements `start` to `stop` of a flat's slice: all of an owned part, or some. `is_last`: the end of it.

    `there`: what the optimizer steps for it on the device.
    """

    part: Owned
    grad: Tensor
    start: int
    stop: int
    is_last: bool
    there: nn.Parameter | None = None


@dataclass(slots=True)
class ChunkSlot:
    """Memory on the device for one chunk. `sent`: when it was copied to the host; until then it holds `kept`."""

    buffers: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)
    sent: Any = None
    kept: Any = None

    def forget(self) -> None:
        """Let the memory be used at once: nothing is under way any more."""
        self.sent = self.kept = None

    def room(self, name: str, size: int, *, dtype: torch.dtype, device: torch.device, largest: int) -> Tensor:
        place = (name, dtype)
        if place not in self.buffers or self.buffers[place].numel() < size:
            self.buffers[place] = torch.empty(largest, dtype=dtype, device=device)
        return self.buffers[place][:size]


def chunks(parts: Sequence[tuple[Owned, Tensor]], *, largest: int) -> Iterator[list[Piece]]:
    """Yield pieces of the parts that together reach over at most `largest` elements."""
    chunk: list[Piece] = []
    for part, grad in sorted(parts, key=lambda found: found[0].start):
        start = part.start
        while start < part.stop:
            if chunk and start - chunk[0].start >= largest:
                yield chunk
                chunk = []
            first = chunk[0].start if chunk else start
            stop = min(part.stop, first + largest)
            chunk.append(Piece(part=part, grad=grad, start=start, stop=stop, is_last=stop == part.stop))
            start = stop
    if chunk:
        yield chunk


class UpdateStreams:
    """The streams of bringing, stepping and sending; without a GPU everything happens at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[str, Any] = {}

    def _stream(self, name: str | None) -> Any:
        if name is None:
            return torch.cuda.current_stream(self._device)
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._streams[name]

    def on(self, name: str) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream(name)) if self._device.type == "cuda" else nullcontext()

    def record(self, name: str | None) -> Any:
        """Return the event of everything so far on a stream (None: that of the computation)."""
        return self._stream(name).record_event() if self._device.type == "cuda" else True

    def wait(self, name: str | None, event: Any) -> None:
        """Let a stream (None: that of the computation) wait for an event, if there is one."""
        if event is not None and self._device.type == "cuda":
            self._stream(name).wait_event(event)

    def follow_compute(self) -> None:
        """Let the streams wait for what is computed so far: gradients, and memory that is used again."""
        if self._device.type == "cuda":
            for name in ("bring", "step", "send"):
                self._stream(name).wait_stream(self._stream(None))
