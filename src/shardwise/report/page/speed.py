"""Speed: samples and tokens per second, and how a step's time is spent."""

from collections.abc import Sequence

from shardwise.bench.results import Bench, CaseResult
from shardwise.quantities import digits, seconds_text
from shardwise.report.page.axes import second_ticks, ticks
from shardwise.report.page.bars import Bar, BarPiece, bar_chart, key
from shardwise.report.page.markup import Markup, numbers_below, small, table
from shardwise.report.page.section import PageSection, cases_that_ran, is_chosen, section


def throughput_section(bench: Bench) -> PageSection | None:
    """One bar per case, with a whisker from the slowest block of steps to the fastest."""
    cases = cases_that_ran(bench)
    if not cases or not bench.equivalence.agrees:
        return None
    highest = 1.02 * max(bench.step_samples / case.step_seconds.low for case in cases if case.step_seconds)
    return section(
        "throughput",
        "Throughput, samples a second",
        bar_chart(
            [_rate_bar(bench, case) for case in cases],
            highest=highest,
            ticks=ticks(highest),
            describe="Samples a second by case",
        ),
        numbers_below(_rate_table(bench, cases)),
        small(
            f"Of all ranks together, {bench.step_samples:,} samples per step. The bar is the median over blocks of "
            "steps in all runs, the whisker goes from the slowest block to the fastest."
        ),
        short="Throughput",
    )


def split_section(bench: Bench) -> PageSection | None:
    """Compute, and communication that no compute hides."""
    cases = cases_that_ran(bench)
    if not bench.equivalence.agrees or all(case.silent_seconds is None for case in cases):
        return None
    highest = 1.02 * max(_seconds(case) for case in cases)
    names = {"compute": "with the wire cut", "exposed": "exposed communication"}
    if any(case.silent_seconds is None for case in cases):
        names["live"] = "not split"
    return section(
        "step-time",
        "What a step's time goes to",
        key(names),
        bar_chart(
            [_split_bar(bench, case) for case in cases],
            highest=highest,
            ticks=second_ticks(highest),
            describe="Seconds of a step by case, compute and exposed communication",
        ),
        numbers_below(_split_table(cases)),
        small(
            "With the wire cut: the same processes at once, whose collectives return at once, so that each rank "
            "computes all that it would and waits for nobody. What a step takes longer than that is exposed "
            "communication."
        ),
        short="Step time",
    )


def _seconds(case: CaseResult) -> float:
    assert case.step_seconds is not None
    return case.step_seconds.median


def _rate_bar(bench: Bench, case: CaseResult) -> Bar:
    spread = case.step_seconds
    assert spread is not None
    samples, tokens = bench.step_samples / spread.median, bench.tokens_per_s(case)
    slowest, fastest = bench.step_samples / spread.high, bench.step_samples / spread.low
    words = f"{case.name}: {digits(samples)} samples/s, from {digits(slowest)} to {digits(fastest)}"
    is_best = is_chosen(bench, case)
    return Bar(
        label=case.name,
        pieces=[BarPiece(kind="chosen-rate" if is_best else "rate", value=samples, title=words)],
        text=f"{digits(samples)}/s" if tokens is None else f"{digits(samples)}/s · {digits(tokens)} tokens/s",
        whisker=(slowest, fastest) if len(spread.values) > 1 else None,
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
                *(digits(bench.step_samples / seconds) for seconds in (spread.median, spread.high, spread.low)),
                "–" if tokens is None else digits(tokens),
                f"{len(spread.values)}",
            ]
        )
    return table(["case", "samples/s", "slowest", "fastest", "tokens/s", "blocks"], rows)


def _split_bar(bench: Bench, case: CaseResult) -> Bar:
    step, exposed = _seconds(case), case.exposed_seconds
    if exposed is None:
        pieces = [BarPiece(kind="live", value=step, title=f"{case.name}: {seconds_text(step)}, not split")]
        return Bar(label=case.name, pieces=pieces, text=seconds_text(step), is_chosen=is_chosen(bench, case))
    rest = step - exposed
    return Bar(
        label=case.name,
        pieces=[
            BarPiece(kind="compute", value=rest, title=f"{case.name}, with the wire cut: {seconds_text(rest)}"),
            BarPiece(kind="exposed", value=exposed, title=f"{case.name}, exposed: {seconds_text(exposed)}"),
        ],
        text=f"{seconds_text(step)} · {exposed / step:.0%} exposed",
        is_chosen=is_chosen(bench, case),
    )


def _split_table(cases: Sequence[CaseResult]) -> Markup:
    def shown(case: CaseResult) -> list[str]:
        silent, exposed = case.silent_seconds, case.exposed_seconds
        return [
            case.name,
            seconds_text(_seconds(case)),
            "–" if silent is None else seconds_text(silent.median),
            "–" if exposed is None else seconds_text(exposed),
            ", ".join(f"{number} {name}" for name, number in case.calls.items()) or "–",
        ]

    return table(["case", "step", "wire cut", "exposed", "collectives a step"], [shown(case) for case in cases])
