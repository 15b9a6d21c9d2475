"""What happens in a step, for those that listen, and the tape of its operations. Without both it computes the same.

Guards, graphs of units and the like add functions to the events' lists; nothing in the core knows them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.comm.groups.rank_progress import PROGRESS
from shardwise.program import Kind


@dataclass(slots=True, kw_only=True)
class StepEvents:
    """Each event is a list of functions that are called in order.

    unit_settled(unit)              the unit's buffers are filled: parameters are what they stay until the plan changes
    unit_rests(unit, parameters)    from now on these parameters, or their gradients, are not to be read
    unit_wakes(unit)                the unit is gathered, and its parameters may be read
    pass_begins(learned)            a training forward begins; `learned`: the order of the units is known
    evaluation_begins()             a forward without gradients begins
    last_backward_begins()          the last backward of a step begins; called in autograd's threads, too
    grads_averaged(flat)            a buffer's sharded gradients are there; called in autograd's threads, too
    gradients_asked()               all gradients are there, and are clipped, stepped or looked at next; may come twice
    update_begins()                 the optimizer's step is about to write; raise to refuse it
    values_read(announced)          values are read outside of a step, so that foreign writes must be taken over or
                                    refused; `announced`: all ranks know that slices were written
    values_replaced()               the engine writes values, and frees next what is gathered of the old ones
    values_written()                an update, or the engine itself, has written values, and all copies have followed
    """

    unit_settled: list[Callable[[Any], None]] = field(default_factory=list)
    unit_rests: list[Callable[[Any, Sequence[nn.Parameter]], None]] = field(default_factory=list)
    unit_wakes: list[Callable[[Any], None]] = field(default_factory=list)
    pass_begins: list[Callable[[bool], None]] = field(default_factory=list)
    evaluation_begins: list[Callable[[], None]] = field(default_factory=list)
    last_backward_begins: list[Callable[[], None]] = field(default_factory=list)
    grads_averaged: list[Callable[[Any], None]] = field(default_factory=list)
    gradients_asked: list[Callable[[], None]] = field(default_factory=list)
    update_begins: list[Callable[[], None]] = field(default_factory=list)
    values_read: list[Callable[[bool], None]] = field(default_factory=list)
    values_replaced: list[Callable[[], None]] = field(default_factory=list)
    values_written: list[Callable[[], None]] = field(default_factory=list)


def announce(event: Sequence[Callable[..., None]], *what: Any) -> None:
    """Call everything that listens to an event."""
    for hear in event:
        hear(*what)


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
