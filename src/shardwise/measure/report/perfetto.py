"""Writes a bench as a trace for ui.perfetto.dev or chrome://tracing.

The format is Chrome's trace-event JSON, with times in microseconds. Each case is a process with these threads:

    compute, gather, reduce    (predicted)    the planner's spans of a step
    compute, gather, reduce    (rank 0)       spans of the recorded tape; every other operation is an instant
    memory                     (counter)      live bytes by category, one value per row of the ledger of rank 0

The ledger has no clock: a row starts when its first operation on the tape was issued.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.base.vocabulary.span import QUEUES, Span
from shardwise.measure.bench.case_result import CaseResult
from shardwise.measure.bench.results import Bench

PerfettoEvent = dict[str, Any]
_MICROSECONDS = 1e6
_PREDICTED, _RECORDED = "predicted", "rank 0"


def trace_of(bench: Bench) -> dict[str, Any]:
    """Return the trace for JSON, without the cases that did not run."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {"name": bench.name, "command": bench.command, "made": bench.made},
        "traceEvents": [event for number, case in enumerate(bench.ran, 1) for event in _process(case, process=number)],
    }


def _process(case: CaseResult, *, process: int) -> Iterator[PerfettoEvent]:
    yield _metadata("process_name", {"name": case.name}, process=process)
    lanes = [(source, queue) for source in (_PREDICTED, _RECORDED) for queue in QUEUES]
    threads = {lane: number for number, lane in enumerate(lanes, 1)}
    spans = () if case.predicted is None else case.predicted.spans
    recorded = case.spans
    used = {(_PREDICTED, span.queue) for span in spans} | {(_RECORDED, span.queue) for span in recorded}
    if case.tape:
        used.add((_RECORDED, QUEUES[0]))
    for (source, queue), thread in threads.items():
        if (source, queue) in used:
            yield _metadata("thread_name", {"name": f"{queue} ({source})"}, process=process, thread=thread)
            yield _metadata("thread_sort_index", {"sort_index": thread}, process=process, thread=thread)
    for source, found in ((_PREDICTED, spans), (_RECORDED, recorded)):
        yield from (_slice(span, process=process, thread=threads[source, span.queue]) for span in found)
    yield from _instants(case, process=process, thread=threads[_RECORDED, QUEUES[0]], drawn=recorded)
    yield from _counters(case, process=process)


def _metadata(name: str, values: Mapping[str, Any], *, process: int, thread: int = 0) -> PerfettoEvent:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": values}


def _slice(span: Span, *, process: int, thread: int) -> PerfettoEvent:
    event = {"ph": "X", "name": span.name, "cat": span.queue, "pid": process, "tid": thread}
    return event | {"ts": span.start * _MICROSECONDS, "dur": (span.end - span.start) * _MICROSECONDS}


def _instants(case: CaseResult, *, process: int, thread: int, drawn: Sequence[Span]) -> Iterator[PerfettoEvent]:
    """Yield the operations that no span shows: waits, frees, flags, broadcasts."""
    # The tape records the end of an update, and the start of everything else.
    shown = {(span.name, moment) for span in drawn for moment in (span.start, span.end)}
    for one in case.scaled_tape:
        name = f"{one.kind} {one.subject}"
        if (name, one.seconds) not in shown:
            event = {"ph": "i", "s": "t", "name": name, "cat": one.kind, "pid": process, "tid": thread}
            yield event | {"ts": one.seconds * _MICROSECONDS, "args": {"num_bytes": one.num_bytes}}


def _counters(case: CaseResult, *, process: int) -> Iterator[PerfettoEvent]:
    """Yield the most live bytes of each row, at the time when the row started."""
    ledger, tape = case.measured_ledger(0), case.scaled_tape
    if ledger is None or not tape:
        return
    starts: dict[int, float] = {}
    for one in tape:
        starts.setdefault(one.row, one.seconds)
    entries = ledger.entries
    moments = [(seconds, entries[row]) for row, seconds in sorted(starts.items()) if row < len(entries)]
    for seconds, entry in (*moments, (tape[-1].seconds, ledger.at_rest)):
        args = dict(entry.num_bytes)
        yield {"ph": "C", "name": "memory", "pid": process, "ts": seconds * _MICROSECONDS, "args": args}
