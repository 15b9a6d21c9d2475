"""A bench for the terminal: tables, and the verdict in words."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.table import Table

from shardwise.base.vocabulary.categories import CATEGORIES
from shardwise.base.vocabulary.quantities import MIB, UnitOfMeasure, error_text, table_number, table_rate, table_unit
from shardwise.measure.bench.case_result import NOT_MEASURABLE, CaseResult
from shardwise.measure.bench.modes import is_ours, without_mode
from shardwise.measure.bench.results import Bench
from shardwise.measure.report.text.plain_table import plain_table
from shardwise.plan.placement import placement_of

# The number of differences that are shown; all are in the bench's JSON.
_MOST_SHOWN = 8
# "Not measurable", in the narrow column of exposed communication.
_NOISE = "n/m"


def heading(bench: Bench) -> str:
    """Say what was run, and on which devices."""
    settings = [bench.settings.get(key) for key in ("task.model", "plan.precision")]
    what = ", ".join(str(value) for value in settings if value is not None)
    rounds = bench.settings.get("bench.rounds", 1)
    return (
        f"{bench.name}: {what}, {bench.step_samples} samples per step, on {bench.num_ranks} × "
        f"{bench.machine.get('device', '?')}, {rounds} round{'s' if rounds != 1 else ''} of "
        f"{bench.settings.get('bench.steps', '?')} steps"
    )


def as_table(bench: Bench) -> Table:
    """Return a table with one row per case that ran; speeds are compared only if all did the same training."""
    heads = columns(bench)
    table = plain_table(heads, right=heads[1:], wraps=heads[:1], gap=1)
    for column in table.columns:
        column.vertical = "bottom"
    for index, case in enumerate(bench.cases):
        if case.ran:
            table.add_row(*row(bench, case), style="bold" if index == bench.recommended else "")
    return table


def peak_table(bench: Bench) -> Table | None:
    """Return a table of the peaks and their categories, which add up to them; None if no categories were measured."""
    found = [(case, parts) for case in bench.cases if case.allocated_bytes and (parts := case.peak_parts()) is not None]
    if not found:
        return None
    unit = _unit(bench)
    heads = (f"{unit.name} per rank\nat the peak", "peak", *CATEGORIES)
    table = plain_table(heads, right=heads[1:], wraps=heads[:1], gap=1)
    for column in table.columns[1:]:
        column.vertical = "bottom"
    for case, parts in found:
        numbers = (case.peak_bytes, *(parts[name] for name in CATEGORIES))
        table.add_row(case.name, *(table_number(num_bytes / unit.size) for num_bytes in numbers))
    return table


def columns(bench: Bench) -> list[str]:
    """Return the heads of the columns, in two lines, so that the table fits into 80 columns."""
    return [
        "",
        "mode",
        ("samples" if bench.step_tokens is None else "tokens") + "\nper s",
        "±",
        *(["×"] if bench.equivalence.agrees else []),
        "step\nms",
        "comm\nexp.",
        f"peak\n{_unit(bench).name}",
        "pred.\nerror",
        f"sent\n{MIB.name}",
        "first\nstep s",
    ]


def row(bench: Bench, case: CaseResult) -> list[str]:
    """Return the cells of a case that ran; unknown numbers are "?"."""
    seconds, first = case.step_seconds, case.first_step_seconds
    assert seconds is not None
    rate = bench.samples_per_s(case) if bench.step_tokens is None else bench.tokens_per_s(case)
    assert rate is not None
    return [
        # The mode has a separate column.
        replace(case, engine=without_mode(case.engine)).name,
        case.mode,
        table_rate(rate),
        "?" if seconds.off is None else f"{seconds.off:.0%}",
        *([f"{baseline(bench).seconds / case.seconds:.2f}"] if bench.equivalence.agrees else []),
        table_number(1000 * case.seconds),
        _exposed(case),
        table_number(case.peak_bytes / _unit(bench).size) if case.allocated_bytes else "?",
        error_text(case.memory_error, unknown="?"),
        "?" if case.sent_bytes is None else table_number(case.sent_bytes / MIB.size),
        "?" if first is None else f"{first.median:.1f}",
    ]


def _exposed(case: CaseResult) -> str:
    if case.why_not_exposed == NOT_MEASURABLE:
        return _NOISE
    return "?" if case.exposed_seconds is None else f"{case.exposed_seconds / case.seconds:.0%}"


def _by(ran: Sequence[CaseResult]) -> str:
    """Say where exposed communication is a difference of two step times, because there is no timeline."""
    differing = [case.name for case in ran if case.exposed_seconds is not None and not case.is_exposed_by_timeline]
    if not differing:
        return ""
    of = "" if len(differing) == len(ran) else f"of {', '.join(differing)} "
    return f" ({of}by the time of a step without communication)"


def baseline(bench: Bench) -> CaseResult:
    """Return the case that × is relative to: our engine with nothing sharded, else the first case that ran."""
    ours = (case for case in bench.ran if is_ours(case.engine))
    return next((case for case in ours if not placement_of(case.strategy).optim.is_sharded), bench.ran[0])


def remarks(bench: Bench) -> Iterator[str]:
    """Explain the columns, and say what did not run, whether all did the same training, and which one to use."""
    ran = bench.ran
    if ran:
        times = f" ×: speed relative to {baseline(bench).name};" if bench.equivalence.agrees else ""
        yield (
            f"±: interquartile range;{times} comm exp.: share of the step spent waiting for communication{_by(ran)}; "
            "peak: live bytes on the fullest rank; sent: per rank per step."
        )
    if any(case.why_not_exposed == NOT_MEASURABLE for case in ran):
        yield (
            f"{_NOISE}: {NOT_MEASURABLE}: the step times with and without communication differ by less than their "
            "spread, or the wrong way."
        )
    for case in bench.cases:
        if case.why_not:
            yield f"{case.name}: did not run: {case.why_not}"
        elif case.why_not_silent:
            yield (
                f"{case.name}: did not run without communication, so what is exposed is not known: "
                f"{case.why_not_silent}"
            )
    yield from _verdict(bench, num_ran=len(ran))
    if bench.why and bench.equivalence.agrees:
        yield bench.why


def _verdict(bench: Bench, *, num_ran: int) -> Iterator[str]:
    equivalence = bench.equivalence
    if equivalence.agrees:
        if num_ran > 1:
            cases = "both" if num_ran == 2 else f"all {num_ran}"
            share = f"{100 * equivalence.largest:.2g}% of the rounding tolerance" if equivalence.largest else "0"
            yield f"Same training: {cases} agree; the largest difference is {share}."
        return
    yield "NOT the same training, so nothing is ranked:"
    for difference in equivalence.differences[:_MOST_SHOWN]:
        yield f"  {difference.text}"
    if len(equivalence.differences) > _MOST_SHOWN:
        yield f"  and {len(equivalence.differences) - _MOST_SHOWN} more"


def _unit(bench: Bench) -> UnitOfMeasure:
    return table_unit(case.peak_bytes for case in bench.cases if case.allocated_bytes)
