"""The queues of a step as text: a column shows what most of its time went to."""

from shardwise.base.vocabulary.span import Span
from shardwise.measure.report.text.queue_lanes import as_data, as_lanes

SPANS = [
    Span("compute", "forward blocks.0", 0.0, 0.4),
    Span("gather", "gather blocks.1", 0.0, 0.2),
    Span("compute", "backward blocks.0", 0.5, 0.9),
    Span("reduce", "reduce blocks.0", 0.9, 1.0),
    Span("compute", "update", 0.9, 1.0),
]


def test_a_lane_shows_what_its_queue_does_and_when_it_stands_still() -> None:
    compute, gather, reduce, scale, letters = as_lanes(SPANS, width=10).splitlines()
    assert compute == "compute FFFF·BBBBU"
    assert gather == "gather  gg········"
    assert reduce == "reduce  ·········r"
    assert scale.endswith(" 1.00 s")
    assert "F forward" in letters


def test_many_short_spans_share_a_column() -> None:
    spans = [Span("compute", f"forward {n}", n / 100, (n + 1) / 100) for n in range(100)]
    assert as_lanes(spans, width=10).splitlines()[0] == "compute " + 10 * "F"


def test_nothing_has_no_lanes() -> None:
    assert as_lanes([]) == ""


def test_the_data_are_the_spans() -> None:
    first = as_data(SPANS)[0]
    assert first == {"queue": "compute", "name": "forward blocks.0", "start_seconds": 0.0, "end_seconds": 0.4}
