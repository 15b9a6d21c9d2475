"""One peak per case: what the categories add up to, wherever they are shown."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from measure.report.sample_bench import sample_bench

from shardwise.base.vocabulary.span import busy_seconds, exposed_gaps
from shardwise.measure.bench.case_result import CaseResult
from shardwise.measure.bench.results import load_bench
from shardwise.measure.bench.results_form import CASE

RESULTS = sorted((Path(__file__).parents[4] / "benchmarks" / "results").glob("bench_*.json"))


def ran(path: Path | None) -> list[CaseResult]:
    bench = sample_bench() if path is None else load_bench(path)
    return [case for case in bench.cases if case.ran and case.allocated_bytes]


@pytest.mark.parametrize("path", [None, *RESULTS], ids=lambda path: "sample" if path is None else path.stem)
def test_categories_add_up_to_the_peak_of_every_case_that_was_looked_at(path: Path | None) -> None:
    looked = [(case, parts) for case in ran(path) if (parts := case.peak_parts()) is not None]
    assert looked or not any(case.ledgers for case in ran(path))
    for case, parts in looked:
        assert sum(parts.values()) == case.peak_bytes
        ledger = case.measured_ledger(case.peak_rank)
        assert ledger is not None
        assert ledger.peak.total_bytes == case.peak_bytes


def test_what_the_recording_did_not_see_is_other_in_every_row() -> None:
    case = ran(None)[0]
    more = replace(case, allocated_bytes=tuple(ledger.peak.total_bytes + 1000 for ledger in case.ledgers))
    ledger = more.measured_ledger(0)
    assert ledger is not None
    pairs = zip((ledger.at_rest, *ledger.entries), (case.ledgers[0].at_rest, *case.ledgers[0].entries), strict=True)
    for entry, recorded in pairs:
        assert entry.num_bytes == {**recorded.num_bytes, "other": recorded.num_bytes["other"] + 1000}


def test_a_recorded_step_that_held_more_than_the_timed_ones_is_not_shown_as_theirs() -> None:
    case = ran(None)[0]
    less = replace(case, allocated_bytes=tuple(ledger.peak.total_bytes - 1 for ledger in case.ledgers))
    assert less.peak_parts() is None
    assert replace(case, ledgers=()).peak_parts() is None


def untaped() -> CaseResult:
    return replace(ran(None)[0], tape=())


class TestExposed:
    def test_with_a_timeline_it_is_what_the_timeline_shows(self) -> None:
        case = ran(None)[0]
        assert case.exposed_seconds == busy_seconds(exposed_gaps(case.spans)) > 0
        assert replace(case, silent_seconds=None).exposed_seconds == case.exposed_seconds
        assert case.to_data()["exposed_seconds"] == case.exposed_seconds

    def test_a_negative_difference_is_noise_and_null_in_json(self) -> None:
        case = untaped()
        assert case.step_seconds is not None
        slower = replace(case.step_seconds, values=tuple(2 * one for one in case.step_seconds.values))
        noisy = replace(case, silent_seconds=slower)
        assert noisy.exposed_seconds is None
        data = json.loads(json.dumps(noisy.to_data()))
        assert (data["exposed_seconds"], data["why_not_exposed"]) == (None, "not measurable here")
        assert CASE(data, "") == noisy

    def test_ranges_that_overlap_are_noise_too(self) -> None:
        case = untaped()
        assert case.step_seconds is not None
        nearly = replace(case.step_seconds, values=tuple(0.99 * one for one in case.step_seconds.values))
        assert replace(case, silent_seconds=nearly).why_not_exposed == "not measurable here"

    def test_a_clear_difference_is_what_it_is(self) -> None:
        case = untaped()
        assert case.step_seconds is not None
        assert case.silent_seconds is not None
        assert case.exposed_seconds == case.step_seconds.median - case.silent_seconds.median
        assert case.to_data()["exposed_seconds"] == case.exposed_seconds

    def test_without_a_run_it_was_not_measured(self) -> None:
        assert replace(untaped(), silent_seconds=None).why_not_exposed == "not measured"
