"""Predictions: compared with measurements, and for more ranks."""

from collections.abc import Mapping
from typing import Any

from shardwise.base.vocabulary.quantities import bytes_text, digits, error_text, seconds_text, table_rate
from shardwise.measure.bench.case_result import CaseResult
from shardwise.measure.bench.results import Bench
from shardwise.measure.report.page.axes import ticks
from shardwise.measure.report.page.bars import Bar, BarPiece, bar_chart
from shardwise.measure.report.page.markup import numbers_below, small, table
from shardwise.measure.report.page.section import PageSection, section


def prediction_section(bench: Bench) -> PageSection | None:
    """Show one row per case that was predicted."""
    cases = [case for case in bench.ran if case.predicted is not None]
    if not cases or not bench.equivalence.agrees:
        return None
    has_times = any(case.predicted is not None and case.predicted.step_seconds is not None for case in cases)
    errors = [abs(case.memory_error) for case in cases if case.memory_error is not None]
    header = ["case", "peak per rank", "predicted", "error"]
    header += ["step time", "predicted", "error"] if has_times else []
    return section(
        "predicted",
        "Predicted and measured" + (f": peak memory within {max(errors):.1%}" if errors else ""),
        table(header, [_compared(case)[: len(header)] for case in cases]),
        small(
            "The planner's numbers for the same case, made without running it. "
            + ("" if has_times else "Step times are predicted once the device is calibrated: shardwise calibrate.")
        ),
        short="Predicted",
        look="folded",
    )


def scaling_section(bench: Bench) -> PageSection | None:
    """Show one bar per number of ranks: the throughput per rank, relative to the smallest number of ranks."""
    rows = [row for row in bench.scaling if row.get("step_seconds")]
    if not rows or not bench.equivalence.agrees:
        return None
    highest = max(1.0, *(row["efficiency"] for row in rows)) * 1.02
    header = ["ranks", "best plan", "micro-batch", "peak per rank", "step time", "samples/s", "efficiency", "exposed"]
    return section(
        "scaling",
        "More ranks, predicted",
        bar_chart(
            [_bar(row) for row in rows],
            highest=highest,
            ticks=[(value, f"{value:.0%}") for value, _ in ticks(highest)],
            describe="Predicted efficiency by number of ranks",
        ),
        numbers_below(
            table(header, [_scaled(row) for row in rows], words=2),
            "Not measured: the planner's best plan for each number of ranks, with the same micro-batch per rank. The "
            "bar is samples/s per rank, relative to the smallest number of ranks.",
        ),
        short="More ranks",
        look="half",
    )


def _compared(case: CaseResult) -> list[str]:
    assert case.predicted is not None
    seconds = case.predicted.step_seconds
    return [
        case.name,
        bytes_text(case.peak_bytes) if case.allocated_bytes else "not measured",
        bytes_text(case.predicted.allocated_bytes),
        error_text(case.memory_error),
        seconds_text(case.seconds),
        "–" if seconds is None else seconds_text(seconds),
        "–" if seconds is None else error_text(case.time_error),
    ]


def _bar(row: Mapping[str, Any]) -> Bar:
    words = f"{row['num_ranks']:,} ranks, {_plan(row)}: {row['efficiency']:.1%}"
    return Bar(
        label=f"{row['num_ranks']:,} ranks",
        remark=_plan(row),
        pieces=[BarPiece(kind="rate", value=row["efficiency"], title=words)],
        text=f"{row['efficiency']:.0%} · {table_rate(row['samples_per_s'])} samples/s",
    )


def _plan(row: Mapping[str, Any]) -> str:
    mesh = row["mesh"]
    return f"{row['strategy']} {mesh['replicate']} × {mesh['shard']}" if mesh["replicate"] > 1 else str(row["strategy"])


def _scaled(row: Mapping[str, Any]) -> list[str]:
    exposed = row["exposed_comm_seconds"]
    return [
        f"{row['num_ranks']:,}",
        _plan(row),
        f"{row['micro_batch']:,}",
        bytes_text(row["peak_bytes"]["device"]),
        seconds_text(row["step_seconds"]),
        digits(row["samples_per_s"]),
        f"{row['efficiency']:.0%}",
        "–" if exposed is None else f"{exposed / row['step_seconds']:.0%}",
    ]
