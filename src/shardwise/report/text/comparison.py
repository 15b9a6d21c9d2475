"""A bench as a table for the terminal, with its verdicts in words, and as Markdown."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.bench.case_peak import peak_parts
from shardwise.bench.case_result import NOT_MEASURABLE, CaseResult
from shardwise.bench.modes import is_ours, without_mode
from shardwise.bench.results import Bench
from shardwise.plan.placement import SHARDED, placement_of
from shardwise.vocabulary.categories import CATEGORIES
from shardwise.vocabulary.quantities import MIB, UnitOfMeasure, error_text, table_number, table_rate, table_unit

if TYPE_CHECKING:
    from rich.table import Table

# At most so many differences are shown; all are in the bench's JSON.
_MOST_TOLD = 8
# In the narrow column of exposed communication.
_NOISE = "n/m"


def heading(bench: Bench) -> str:
    """What was run where."""
    told = [bench.settings.get(key) for key in ("task.model", "plan.precision")]
    what = ", ".join(str(value) for value in told if value is not None)
    rounds = bench.settings.get("bench.rounds", 1)
    return (
        f"{bench.name}: {what}, {bench.step_samples} samples per step, on {bench.num_ranks} × "
        f"{bench.machine.get('device', '?')}, {rounds} round{'s' if rounds != 1 else ''} of "
        f"{bench.settings.get('bench.steps', '?')} steps"
    )


def as_table(bench: Bench) -> "Table":
    """One row per case that ran; ranked only if all of them did the same training."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for number, column in enumerate(columns(bench)):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=number > 0, vertical="bottom")
    for index, case in enumerate(bench.cases):
        if case.ran:
            table.add_row(*row(bench, case), style="bold" if index == bench.recommended else "")
    return table


def peak_table(bench: Bench) -> "Table | None":
    """The peak of each case by category, which add up to it. None where nobody looked."""
    from rich.table import Table

    looked = [(case, parts) for case in bench.cases if case.allocated_bytes and (parts := peak_parts(case)) is not None]
    if not looked:
        return None
    unit = _unit(bench)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column(f"{unit.name} per rank\nat the peak")
    for name in ("peak", *CATEGORIES):
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for case, parts in looked:
        numbers = (case.peak_bytes, *(parts[name] for name in CATEGORIES))
        table.add_row(case.name, *(table_number(num_bytes / unit.size) for num_bytes in numbers))
    return table


def as_markdown(bench: Bench) -> str:
    """The same table, and the same words below it."""
    heads = [column.replace("\n", " ") for column in columns(bench)]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
    lines += [[cell.replace("|", "\\|") for cell in row(bench, case)] for case in bench.cases if case.ran]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([table, *(_escaped(remark) for remark in remarks(bench))]) + "\n"


def columns(bench: Bench) -> list[str]:
    """Heads in two lines, so that the table has room in 80 columns."""
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
    """A case that ran; ? where a number is not known."""
    seconds, first = case.step_seconds, case.first_step_seconds
    assert seconds is not None
    rate = bench.samples_per_s(case) if bench.step_tokens is None else bench.tokens_per_s(case)
    assert rate is not None
    base = baseline(bench).step_seconds
    assert base is not None
    return [
        # The mode has a column of its own.
        replace(case, engine=without_mode(case.engine)).name,
        case.mode,
        table_rate(rate),
        "?" if seconds.off is None else f"{seconds.off:.0%}",
        *([f"{base.median / seconds.median:.2f}"] if bench.equivalence.agrees else []),
        table_number(1000 * seconds.median),
        _exposed(case),
        table_number(case.peak_bytes / _unit(bench).size) if case.allocated_bytes else "?",
        error_text(case.memory_error, unknown="?"),
        "?" if case.sent_bytes is None else table_number(case.sent_bytes / MIB.size),
        "?" if first is None else f"{first.median:.1f}",
    ]


def _exposed(case: CaseResult) -> str:
    if case.why_not_exposed == NOT_MEASURABLE:
        return _NOISE
    exposed, seconds = case.exposed_seconds, case.step_seconds
    return "?" if exposed is None or seconds is None else f"{exposed / seconds.median:.0%}"


def baseline(bench: Bench) -> CaseResult:
    """What × is relative to: our engine with nothing sharded, or what ran first."""
    ran = [case for case in bench.cases if case.ran]
    ours = (case for case in ran if is_ours(case.engine))
    return next((case for case in ours if placement_of(case.strategy).optim is not SHARDED), ran[0])


def remarks(bench: Bench) -> Iterator[str]:
    """What the columns mean, what did not run, whether all did the same training, and which one to use."""
    ran = [case for case in bench.cases if case.ran]
    if ran:
        times = f" ×: speed relative to {baseline(bench).name};" if bench.equivalence.agrees else ""
        yield (
            f"±: interquartile range;{times} comm exp.: share of the step spent waiting for communication; "
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
            how = "both" if num_ran == 2 else f"all {num_ran}"
            share = f"{100 * equivalence.largest:.2g}% of the rounding tolerance" if equivalence.largest else "0"
            yield f"Same training: {how} agree; the largest difference is {share}."
        return
    yield "NOT the same training, so nothing is ranked:"
    for difference in equivalence.differences[:_MOST_TOLD]:
        yield f"  {difference.text}"
    if len(equivalence.differences) > _MOST_TOLD:
        yield f"  and {len(equivalence.differences) - _MOST_TOLD} more"


def _escaped(text: str) -> str:
    """Module names and error messages may contain characters that mean something in Markdown and HTML."""
    return "".join(f"\\{sign}" if sign in "\\`*_<>[]|" else sign for sign in text)


def _unit(bench: Bench) -> UnitOfMeasure:
    return table_unit(case.peak_bytes for case in bench.cases if case.allocated_bytes)
