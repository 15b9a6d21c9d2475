"""The tape: the operations that a run issued. Off, it costs a comparison and two assignments per operation."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.comm.rank_progress import PROGRESS
from shardwise.program import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class TapeEntry:
    """One operation as it was issued: what, on what, in which queue, when, and on how many bytes (padding included)."""

    kind: Kind
    subject: str
    num_bytes: int
    seconds: float

    @property
    def stream(self) -> str:
        return self.kind.stream

    def __str__(self) -> str:
        return f"{self.kind.value} {self.subject}"


class Tape:
    """Records while `recording`; `take` hands out what was recorded since the last time.

    `on_entry`, if there is one, is called after each entry: what frees or waits is done by then, what computes begins.
    """

    def __init__(self) -> None:
        self.recording = False
        self.on_entry: Callable[[TapeEntry], None] | None = None
        self._entries: list[TapeEntry] = []

    def record(self, kind: Kind, subject: str, num_bytes: Callable[[], int] | None = None) -> None:
        # What the watchdog tells of a rank that has stopped.
        PROGRESS.kind = kind
        PROGRESS.unit = subject
        if not self.recording:
            return
        entry = TapeEntry(
            kind=kind,
            subject=subject,
            num_bytes=num_bytes() if num_bytes else 0,
            seconds=time.perf_counter(),
        )
        self._entries.append(entry)
        if self.on_entry is not None:
            self.on_entry(entry)

    def take(self) -> list[TapeEntry]:
        entries, self._entries = self._entries, []
        return entries
