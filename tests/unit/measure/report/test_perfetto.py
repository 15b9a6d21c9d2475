import json
from dataclasses import replace

import pytest
from measure.report.sample_bench import sample_bench

from shardwise.base.vocabulary.categories import CATEGORIES
from shardwise.measure.bench.results import Bench
from shardwise.measure.report.perfetto import trace_of


@pytest.fixture(scope="module")
def bench() -> Bench:
    return sample_bench()


def events(bench: Bench, phase: str, process: int) -> list[dict]:
    return [event for event in trace_of(bench)["traceEvents"] if event["ph"] == phase and event["pid"] == process]


def test_events_have_the_fields_of_their_phase(bench: Bench) -> None:
    trace = json.loads(json.dumps(trace_of(bench), allow_nan=False))
    needed = {
        "M": {"name", "pid", "tid", "args"},
        "X": {"name", "cat", "pid", "tid", "ts", "dur"},
        "i": {"name", "cat", "pid", "tid", "ts", "s", "args"},
        "C": {"name", "pid", "ts", "args"},
    }
    for event in trace["traceEvents"]:
        assert event.keys() - {"ph"} == needed[event["ph"]]
        assert event.get("dur", 0) >= 0
        assert event.get("ts", 0) >= 0


def test_each_case_that_ran_is_a_process(bench: Bench) -> None:
    names = [one["args"]["name"] for one in trace_of(bench)["traceEvents"] if one["name"] == "process_name"]
    assert names == [case.name for case in bench.cases if case.ran]


def test_slices_lie_in_named_threads_in_microseconds(bench: Bench) -> None:
    fsdp = next(at for at, case in enumerate(bench.cases) if case.name == "fsdp")
    case = bench.cases[fsdp]
    threads = {one["tid"]: one["args"]["name"] for one in events(bench, "M", fsdp + 1) if one["name"] == "thread_name"}
    assert list(threads.values()) == [
        f"{queue} ({source})" for source in ("predicted", "rank 0") for queue in ("compute", "gather", "reduce")
    ]
    slices = events(bench, "X", fsdp + 1)
    predicted = [one for one in slices if threads[one["tid"]].endswith("(predicted)")]
    assert case.predicted is not None
    assert [(one["cat"], one["name"], one["ts"]) for one in predicted] == [
        (queue, name, pytest.approx(start * 1e6)) for queue, name, start, _ in case.predicted.spans
    ]
    assert all(threads[one["tid"]].startswith(one["cat"]) for one in slices)


def test_every_operation_of_the_tape_is_a_slice_or_an_instant(bench: Bench) -> None:
    fsdp = next(at for at, case in enumerate(bench.cases) if case.name == "fsdp")
    recorded = {4, 5, 6}
    found = [
        # An update is on the tape when it ends.
        (one["name"], pytest.approx(one["ts"] + one["dur"] if one["name"].startswith("update") else one["ts"]))
        for phase in ("X", "i")
        for one in events(bench, phase, fsdp + 1)
        if one["tid"] in recorded
    ]
    tape = [(f"{one.kind} {one.subject}", one.seconds * 1e6) for one in bench.cases[fsdp].scaled_tape]
    assert sorted(tape) == sorted(found, key=lambda one: (one[0], one[1].expected))


def test_memory_is_a_counter_of_the_ledger(bench: Bench) -> None:
    counters = events(bench, "C", 1)
    ledger = bench.cases[0].ledgers[0]
    assert counters[0]["args"] == ledger.entries[0].num_bytes
    assert counters[-1]["args"] == ledger.at_rest.num_bytes
    assert all(set(one["args"]) == set(CATEGORIES) for one in counters)
    assert [one["ts"] for one in counters] == sorted(one["ts"] for one in counters)


def test_engine_without_tape_and_prediction_has_a_name_only(bench: Bench) -> None:
    bare = replace(bench.cases[0], tape=(), predicted=None)
    found = trace_of(replace(bench, cases=(bare,)))["traceEvents"]
    assert [event["name"] for event in found] == ["process_name"]
