import re

import pytest

from shardwise.base.vocabulary.span import Span, busy_seconds, exposed_gaps
from shardwise.measure.bench.tape_spans import Happening, recorded_spans
from shardwise.measure.report.page.axes import between, byte_ticks, round_step, ticks
from shardwise.measure.report.page.bars import Bar, BarPiece, bar_chart
from shardwise.measure.report.page.lanes import lane_chart, merged
from shardwise.measure.report.page.plots import Curve, PlotFrame, area_plot, curve_plot

FRAME = PlotFrame(low=0, high=10, ticks=[(0, "0"), (10, "10")], below=[(0.0, "step 1")], height=108)


@pytest.mark.parametrize(("span", "step"), [(10, 2.5), (1, 0.25), (17.9, 5), (0.04, 0.01), (4, 1), (1000, 250)])
def test_steps_of_an_axis_are_round(span: float, step: float) -> None:
    assert round_step(span) == pytest.approx(step)


def test_axis_ends_before_its_highest_value_and_names_its_unit() -> None:
    assert ticks(11, unit=(1.0, "ms")) == [(0, "0"), (5, "5"), (10, "10 ms")]
    assert byte_ticks(3 * 2**30) == [(0, "0"), (2**30, "1"), (2 * 2**30, "2"), (3 * 2**30, "3 GiB")]


def test_axis_that_does_not_begin_at_zero_has_round_numbers() -> None:
    assert [text for _, text in between(3.45, 5.62)] == ["3.5", "4.0", "4.5", "5.0", "5.5"]
    assert [text for _, text in between(-0.02, 0.011)] == ["-0.02", "-0.01", "0.00", "0.01"]
    assert between(2.0, 2.0), "a flat curve has an axis too"


def test_pieces_of_a_bar_follow_each_other_up_to_its_value() -> None:
    pieces = [
        BarPiece(kind="params", value=2, title="p"),
        BarPiece(kind="grads", value=0, title="g"),
        BarPiece(kind="optim", value=6, title="o"),
    ]
    bar = Bar(label="<b>", pieces=pieces, text="8", whisker=(7, 9), mark=(7.5, "predicted"))
    drawn = bar_chart([bar], highest=10, ticks=[(0, "0")], describe="x", limit=(9.5, "capacity"))
    rects = re.findall(r'<rect x="(.*?)" y="4" width="(.*?)" height="17" class="(.*?)"><title>(.)</title>', drawn)
    assert rects == [("0%", "20%", "params", "p"), ("20%", "60%", "optim", "o")]
    assert '<line x1="75%" x2="75%" y1="0" y2="25" class="mark"><title>predicted</title>' in drawn
    assert drawn.count('class="whisker"') == 3
    assert 'x1="95%"' in drawn
    assert "&lt;b&gt;" in drawn


def test_curves_begin_and_end_at_the_edges_of_the_field() -> None:
    curves = [Curve(name="a", kind="case-0", values=(10, 0)), Curve(name="b", kind="case-1", values=(5, 5, 5))]
    drawn = curve_plot(curves, frame=FRAME, describe="x")
    assert 'points="0.0,8.0 500.0,108.0"' in drawn, "the shorter one ends where its steps end"
    assert 'points="0.0,58.0 500.0,58.0 1000.0,58.0"' in drawn
    assert [int(at) for at in re.findall(r'stroke-dashoffset="(-?\d+)"', drawn)] == [0, -14], "dashes take turns"


def test_areas_lie_on_each_other_under_the_predicted_line() -> None:
    columns = [{"params": 5.0, "grads": 0.0}, {"params": 5.0, "grads": 5.0}]
    drawn = area_plot(columns, titles=["first", "second"], line=[None, 10.0], frame=FRAME, describe="x")
    bands = dict(re.findall(r'<path d="(.*?)" class="(.*?)">', drawn))
    by_class = {kind: path for path, kind in bands.items()}
    assert (
        by_class["params"]
        == "M0.0,58.0 500.0,58.0 500.0,58.0 1000.0,58.0 1000.0,108.0 500.0,108.0 500.0,108.0 0.0,108.0Z"
    )
    assert by_class["grads"].startswith("M0.0,58.0 500.0,58.0 500.0,8.0 1000.0,8.0")
    assert by_class["expected"] == "M500.0,8.0H1000.0", "the line is broken where nothing was predicted"
    assert "<title>second</title>" in drawn


def test_exposed_is_where_a_wire_is_busy_and_compute_is_not() -> None:
    spans = [
        Span("compute", "forward a", 0, 2),
        Span("gather", "gather b", 1, 4),
        Span("reduce", "reduce c", 3, 5),
        Span("compute", "forward b", 4.5, 6),
        Span("reduce", "reduce d", 7, 8),
    ]
    assert [(gap.start, gap.end) for gap in exposed_gaps(spans)] == [(2, 4), (4, 4.5), (7, 8)]
    drawn = lane_chart(spans, exposed=list(exposed_gaps(spans)), step_seconds=8, end_seconds=8, describe="x")
    assert drawn.count('class="exposed') == 3
    assert busy_seconds([Span("gather", "gather a", 0, 3), Span("gather", "gather b", 2, 4)]) == 4


def test_lanes_of_many_narrow_spans_are_drawn_as_few() -> None:
    spans = [Span("gather", f"gather {at}", at * 1e-4, (at + 1) * 1e-4) for at in range(10_000)]
    found = merged(spans, end=1.0)
    assert len(found) < 1500
    assert found[0].start == 0
    assert found[-1].end == pytest.approx(1.0)
    assert found[0].name.startswith("gather 0 … gather ")


def test_wide_spans_are_drawn_as_they_are() -> None:
    spans = [Span("compute", "forward a", 0, 0.5), Span("compute", "forward b", 0.5, 1.0)]
    assert merged(spans, end=1.0) == spans


def happenings(tape: list[tuple[str, str, float]]) -> list[Happening]:
    return [
        Happening(kind=kind, subject=subject, num_bytes=0, seconds=seconds, row=0) for kind, subject, seconds in tape
    ]


def test_collective_of_a_tape_lasts_until_it_was_waited_for() -> None:
    tape = [
        ("gather", "a", 0.0),
        ("gather", "b", 1.0),
        ("wait gather", "a", 2.0),
        ("forward", "a", 3.0),
        ("free", "a", 5.0),
    ]
    assert recorded_spans(happenings(tape)) == [
        Span("gather", "gather a", 0.0, 2.0),
        Span("compute", "forward a", 3.0, 5.0),
        Span("gather", "gather b", 1.0, 5.0),
    ]
    assert recorded_spans([]) == []


def test_an_update_has_lasted_since_the_operation_before_it() -> None:
    tape = [("backward", "a", 0.0), ("wait reduce", "a", 2.0), ("update", "(root)", 3.0), ("gather", "a", 3.5)]
    assert recorded_spans(happenings(tape), end=4.0) == [
        Span("compute", "backward a", 0.0, 2.0),
        Span("compute", "update (root)", 2.0, 3.0),
        Span("gather", "gather a", 3.5, 4.0),
    ]


def test_a_slice_of_a_tape_is_in_the_queue_of_reduces_beside_its_bucket() -> None:
    tape = [
        ("reduce", "a", 0.0),
        ("wait reduce", "a", 1.0),
        ("reduce slice", "a", 2.0),
        ("reduce", "b", 3.0),
        ("wait reduce", "b", 4.0),
        ("wait slice", "a", 5.0),
    ]
    assert recorded_spans(happenings(tape)) == [
        Span("reduce", "reduce a", 0.0, 1.0),
        Span("reduce", "reduce b", 3.0, 4.0),
        Span("reduce", "reduce slice a", 2.0, 5.0),
    ]
