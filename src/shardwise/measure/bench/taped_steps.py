"""Tapes a step of typical length, and finds the rows of its operations in the recorded step. Only our engine has tapes.

A step whose memory is recorded is slower than a timed one. So the times of the tape come from a step that was not
recorded, and only its rows come from the recorded one, which issues the same operations.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from shardwise.engine.core.step_events import TapeEntry
from shardwise.engine.engine import tape
from shardwise.engines import find_engine
from shardwise.measure.bench.run_files import Found
from shardwise.measure.bench.subject import BenchTraining
from shardwise.measure.bench.tape_spans import Happening
from shardwise.measure.profile.memory_ledger import Lasts
from shardwise.measure.profile.recording import StepRecording
from shardwise.plan.limits import LIMITS
from shardwise.program import Kind

NUM_TAPED = 6
"""The number of steps that are taped; of all but the first, the most typical one is kept."""
# An update is taped when it is done, other operations that compute when they begin.
_LASTS = {Kind.FORWARD: Lasts.UNTIL_NEXT, Kind.BACKWARD: Lasts.UNTIL_NEXT, Kind.UPDATE: Lasts.SINCE_LAST}


def with_usual_tape(found: Found, subject: BenchTraining) -> Found:
    """Tape a few steps; on rank 0, add the operations and the time of the one whose time is nearest the median."""
    if not _has_tape(subject):
        return found
    # The first one is not typical: no gathers of an earlier update end in it.
    _, *steps = [_timed(subject) for _ in range(NUM_TAPED)]
    subject.settle()
    usual = statistics.median(found.block_seconds or [took for took, _, _ in steps])
    took, began, entries = min(steps, key=lambda step: abs(step[0] - usual))
    if found.rank != 0:
        return found
    happenings = tuple(_happening(entry, row=0, seconds=entry.seconds - began) for entry in entries)
    return replace(found, tape=happenings, tape_seconds=took)


def recorded_step(subject: BenchTraining, recording: StepRecording) -> list[TapeEntry]:
    """Take the step that is recorded, and mark each operation in the recording."""

    def note(entry: TapeEntry) -> None:
        recording.note_operation(str(entry), lasts=_LASTS.get(entry.kind, Lasts.NOT))

    with recording.step():
        return _taped(subject, on_entry=note)


def with_rows(found: Found, entries: Sequence[TapeEntry], recording: StepRecording) -> Found:
    """On rank 0, add the row of each operation; if the recorded step issued others, use its tape instead."""
    if found.rank != 0:
        return found
    places = [recording.place(entry.seconds) for entry in entries]
    if [(one.kind, one.subject) for one in found.tape] == [(one.kind.value, one.subject) for one in entries]:
        rows = (row for row, _ in places)
        return replace(found, tape=tuple(replace(one, row=row) for one, row in zip(found.tape, rows, strict=True)))
    recorded = zip(entries, places, strict=True)
    happenings = tuple(_happening(entry, row=row, seconds=seconds) for entry, (row, seconds) in recorded)
    return replace(found, tape=happenings, tape_seconds=None)


def _timed(subject: BenchTraining) -> tuple[float, float, list[TapeEntry]]:
    """Take one step, without waiting for its last gathers; return its duration, its begin and its operations."""
    began = time.perf_counter()
    entries = _taped(subject)
    if subject.training.device.type == "cuda":
        torch.cuda.synchronize(subject.training.device)
    return time.perf_counter() - began, began, entries


def _has_tape(subject: BenchTraining) -> bool:
    engine = find_engine(subject.training.model)
    return engine is not None and LIMITS[engine.plan.engine].why_not_call("tape", engine.plan) is None


def _taped(subject: BenchTraining, *, on_entry: Callable[[TapeEntry], None] | None = None) -> list[TapeEntry]:
    if not _has_tape(subject):
        subject.step()
        return []
    with tape(subject.training.model) as recorded:
        recorded.on_entry = on_entry
        try:
            subject.step()
        finally:
            recorded.on_entry = None
        return recorded.take()


def _happening(entry: TapeEntry, *, row: int, seconds: float) -> Happening:
    return Happening(kind=entry.kind.value, subject=entry.subject, num_bytes=entry.num_bytes, seconds=seconds, row=row)
