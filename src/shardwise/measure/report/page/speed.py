"""Speed: samples and tokens per second, and the exposed communication of a step."""

from collections.abc import Sequence

from shardwise.base.vocabulary.quantities import digits, seconds_text
from shardwise.measure.bench.case_result import NOT_MEASURABLE, NOT_MEASURED, CaseResult
from shardwise.measure.bench.results import Bench
from shardwise.measure.report.page.axes import second_ticks, ticks
from shardwise.measure.report.page.bars import Bar, BarPiece, bar_chart, key
from shardwise.measure.report.page.markup import Markup, numbers_below, table
from shardwise.measure.report.page.section import PageSection, exposed_text, is_chosen, off_text, section


def throughput_section(bench: Bench) -> PageSection | None:
    """Show one bar per case, with a whisker over the interquartile range of its blocks of steps."""
    cases = bench.ran
    if not cases or not bench.equivalence.agrees:
        return None
    highest = 1.02 * max(bench.step_samples / case.step_seconds.middle[0] for case in cases if case.step_seconds)
    return section(
        "throughput",
        "Throughput, samples/s",
        bar_chart(
            [_rate_bar(bench, case) for case in cases],
            highest=highest,
            ticks=ticks(highest),
            describe="Samples per second by case",
        ),
        numbers_below(
            _rate_table(bench, cases),
            f"All ranks together, {bench.step_samples:,} samples per step. The bar is the median over blocks of steps "
            "in all runs, the whisker their interquartile range: two cases whose whiskers overlap cannot be ranked.",
        ),
        short="Throughput",
        look="half",
    )


def split_section(bench: Bench) -> PageSection | None:
    """Show the step times: computation, and communication that is not hidden behind it."""
    cases = bench.ran
    if not bench.equivalence.agrees or all(case.why_not_exposed == NOT_MEASURED for case in cases):
        return None
    highest = 1.02 * max(case.seconds for case in cases)
    names = {"compute": "the rest of the step", "exposed": "exposed communication"}
    reasons = list(dict.fromkeys(case.why_not_exposed for case in cases if case.why_not_exposed))
    if reasons:
        names["live"] = f"exposed communication {' or '.join(reasons)}"
    if all(case.why_not_exposed for case in cases):
        names = {"live": names["live"]}
    return section(
        "step-time",
        "Step time",
        key(names),
        bar_chart(
            [_split_bar(bench, case) for case in cases],
            highest=highest,
            ticks=second_ticks(highest),
            describe="Seconds of a step by case, compute and exposed communication",
        ),
        numbers_below(
            _split_table(cases),
            "Exposed communication: the time in which rank 0 computes nothing while something is being sent, in the "
            "step that the timeline shows. Without communication: the same processes, whose collectives return at "
            "once, so that each rank computes all that it would and waits for no other.",
            *(
                [
                    "Where there is no timeline of CPU ranks, exposed communication is by difference: the time by "
                    "which a step takes longer than without communication. Where the two times overlap in their "
                    f"interquartile ranges, or the step is the shorter one, it is {NOT_MEASURABLE}: the difference is "
                    "noise."
                ]
                if not all(case.is_exposed_by_timeline for case in cases)
                else []
            ),
        ),
        look="half",
    )


def _rate_bar(bench: Bench, case: CaseResult) -> Bar:
    spread = case.step_seconds
    assert spread is not None
    samples, tokens = bench.step_samples / spread.median, bench.tokens_per_s(case)
    fast, slow = (bench.step_samples / seconds for seconds in spread.middle)
    words = f"{case.name}: {digits(samples)} samples/s {off_text(case)}, {digits(slow)} to {digits(fast)}"
    is_best = is_chosen(bench, case)
    return Bar(
        label=case.name,
        pieces=[BarPiece(kind="chosen-rate" if is_best else "rate", value=samples, title=words)],
        text=f"{digits(samples)}/s" if tokens is None else f"{digits(samples)}/s · {digits(tokens)} tokens/s",
        whisker=(slow, fast) if len(spread.values) > 1 else None,
        is_chosen=is_best,
    )


def _rate_table(bench: Bench, cases: Sequence[CaseResult]) -> Markup:
    rows = []
    for case in cases:
        spread, tokens = case.step_seconds, bench.tokens_per_s(case)
        assert spread is not None
        rows.append(
            [
                case.name,
                digits(bench.step_samples / spread.median),
                off_text(case),
                *(digits(bench.step_samples / seconds) for seconds in (spread.high, spread.low)),
                "–" if tokens is None else digits(tokens),
                f"{len(spread.values)}",
            ]
        )
    return table(["case", "samples/s", "±", "slowest", "fastest", "tokens/s", "blocks"], rows)


def _split_bar(bench: Bench, case: CaseResult) -> Bar:
    step, exposed = case.seconds, case.exposed_seconds
    if exposed is None:
        words = f"{case.name}: {seconds_text(step)}, exposed communication {case.why_not_exposed}"
        pieces = [BarPiece(kind="live", value=step, title=words)]
        return Bar(label=case.name, pieces=pieces, text=seconds_text(step), is_chosen=is_chosen(bench, case))
    rest = step - exposed
    return Bar(
        label=case.name,
        pieces=[
            BarPiece(kind="compute", value=rest, title=f"{case.name}, the rest of the step: {seconds_text(rest)}"),
            BarPiece(kind="exposed", value=exposed, title=f"{case.name}, exposed: {seconds_text(exposed)}"),
        ],
        text=f"{seconds_text(step)} · {exposed_text(case)} exposed",
        is_chosen=is_chosen(bench, case),
    )


def _split_table(cases: Sequence[CaseResult]) -> Markup:
    def shown(case: CaseResult) -> list[str]:
        silent, exposed = case.silent_seconds, case.exposed_seconds
        return [
            case.name,
            seconds_text(case.seconds),
            "–" if silent is None else seconds_text(silent.median),
            case.why_not_exposed
            if exposed is None
            else f"{seconds_text(exposed)}, {exposed_text(case)}"
            + ("" if case.is_exposed_by_timeline else " (by difference)"),
            ", ".join(f"{number} {name}" for name, number in case.calls.items()) or "–",
        ]

    header = ["case", "step time", "without communication", "exposed communication", "collectives per step"]
    return table(header, [shown(case) for case in cases])
