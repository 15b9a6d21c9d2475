"""Memory per rank: at the peak of each case, and through one step."""

from collections.abc import Mapping, Sequence

from shardwise.base.vocabulary.categories import CATEGORIES
from shardwise.base.vocabulary.quantities import byte_unit, bytes_text, digits_in, error_text
from shardwise.measure.bench.case_result import CaseResult
from shardwise.measure.bench.results import Bench
from shardwise.measure.profile.memory_ledger import LedgerEntry, MemoryLedger, paired
from shardwise.measure.report.page.axes import Tick, byte_ticks
from shardwise.measure.report.page.bars import Bar, BarPiece, bar_chart, key
from shardwise.measure.report.page.markup import Markup, element, join, numbers_below, small, table
from shardwise.measure.report.page.plots import PlotFrame, area_plot
from shardwise.measure.report.page.section import PageSection, is_chosen, section

_HEIGHT = 84
# The capacity is drawn as a line up to this many times the highest bar; farther away, it would make the bars too short.
_FARTHEST = 2.5
# Categories that never reach this share of the highest bar are too thin to see, and left out of the legend.
_SEEN = 1e-3
_MOST_SHOWN = 6
"""Further cases are folded."""
_PHASES = {"before forward": "forward", "before backward": "backward", "after step": "update"}


def peak_section(bench: Bench) -> PageSection | None:
    """Show one bar per case: the peak of the rank with the highest peak."""
    cases = [case for case in bench.ran if any(case.allocated_bytes)]
    if not cases or not bench.equivalence.agrees:
        return None
    highest = max(max(case.peak_bytes, _predicted(case) or 0) for case in cases) * 1.02
    capacity = bench.capacity_bytes
    limit = words = None
    if capacity is not None and capacity <= _FARTHEST * highest:
        highest = max(highest, capacity * 1.02)
        limit = capacity, f"capacity {bytes_text(capacity)}"
    elif capacity is not None:
        share = max(case.peak_bytes for case in cases) / capacity
        words = small(f"The device has {bytes_text(capacity)} per rank: the highest peak is {share:.1%} of it.")
    names = {name: name for name in CATEGORIES if any(_parts(case).get(name, 0) > _SEEN * highest for case in cases)}
    if any("live" in _parts(case) for case in cases):
        names["live"] = "not split"
    if any(case.predicted for case in cases):
        names["mark"] = "predicted"
    return section(
        "memory",
        "Peak memory per rank",
        key(names),
        bar_chart(
            [_bar(bench, case) for case in cases],
            highest=highest,
            ticks=byte_ticks(highest),
            limit=limit,
            describe="Peak memory per rank by case, stacked by category",
        ),
        words,
        numbers_below(
            _peak_table(cases),
            "Live bytes at the highest moment of a step, on the rank with the highest peak; the categories add up to "
            "it. Gathered: temporary full parameters. Reduce: buffers being reduced. Other: also what was allocated "
            "before the recorded step, such as workspaces of libraries. Communication buffers of other engines count "
            "as activations or other.",
        ),
        short="Memory",
        look="half",
    )


def step_section(bench: Bench) -> PageSection | None:
    """Show one small chart per case, all on one scale."""
    cases = [(case, ledger) for case in bench.ran if (ledger := case.measured_ledger(case.peak_rank)) is not None]
    if not cases:
        return None
    highest = 1.04 * max(entry.total_bytes for one in cases for row in _rows(*one) for entry in row if entry)
    entries = [entry for _, ledger in cases for entry in ledger.entries]
    names = {name: name for name in CATEGORIES if any(one.num_bytes.get(name, 0) > _SEEN * highest for one in entries)}
    if any(case.predicted for case, _ in cases):
        names["expected"] = "predicted"
    figures = [_multiple(*one, highest=highest) for one in cases]
    more = figures[_MOST_SHOWN:]
    return section(
        "step-memory",
        "Memory through one step",
        key(names),
        element("div", *figures[:_MOST_SHOWN], class_="multiples"),
        element("details", element("summary", f"{len(more)} more cases"), element("div", *more, class_="multiples"))
        if more
        else None,
        numbers_below(
            join(part for one in cases for part in (element("h3", one[0].name), _step_table(*one))),
            "One recorded step of the rank with the highest peak: one column per row of the step program, its height "
            "what was live at the highest moment of that row. All cases are on one scale.",
        ),
        short="Through a step",
    )


def _bar(bench: Bench, case: CaseResult) -> Bar:
    predicted = _predicted(case)
    return Bar(
        label=case.name,
        pieces=[
            BarPiece(kind=name, value=size, title=f"{case.name}, {name}: {bytes_text(size)}")
            for name, size in _parts(case).items()
        ],
        text=bytes_text(case.peak_bytes),
        mark=None if predicted is None else (predicted, f"{case.name}, predicted: {bytes_text(predicted)}"),
        is_chosen=is_chosen(bench, case),
    )


def _parts(case: CaseResult) -> Mapping[str, int]:
    """Return the peak by category, if there is a ledger."""
    return case.peak_parts() or {"live": case.peak_bytes}


def _predicted(case: CaseResult) -> int | None:
    return None if case.predicted is None else case.predicted.allocated_bytes


def _peak_table(cases: Sequence[CaseResult]) -> Markup:
    unit = byte_unit(max(case.peak_bytes for case in cases))
    has_reserved = any(case.reserved_bytes for case in cases)
    header = [f"{unit.name} per rank", "peak", "lowest rank", "predicted", "error", *CATEGORIES]
    rows = []
    for case in cases:
        parts, predicted = _parts(case), _predicted(case)
        rows.append(
            [
                case.name,
                digits_in(case.peak_bytes, unit=unit),
                digits_in(min(case.allocated_bytes), unit=unit),
                "–" if predicted is None else digits_in(predicted, unit=unit),
                error_text(case.memory_error),
                *(digits_in(parts[name], unit=unit) if name in parts else "–" for name in CATEGORIES),
            ]
        )
        if has_reserved:
            rows[-1].append(digits_in(max(case.reserved_bytes), unit=unit) if case.reserved_bytes else "–")
    return table([*header, *(["reserved"] if has_reserved else [])], rows)


def _rows(case: CaseResult, ledger: MemoryLedger) -> list[tuple[LedgerEntry, LedgerEntry | None]]:
    expected = () if case.predicted is None else case.predicted.entries
    return list(paired(ledger.entries, [LedgerEntry(at=at, num_bytes=parts) for at, parts in expected]))


def _multiple(case: CaseResult, ledger: MemoryLedger, *, highest: float) -> Markup:
    rows = _rows(case, ledger)
    peak = ledger.peak
    below: list[Tick] = []
    for at, (entry, _) in enumerate(rows):
        phase = next((name for label, name in _PHASES.items() if entry.at.startswith(label)), None)
        if phase is not None and phase not in [text for _, text in below]:
            below.append((at / len(rows), phase))
    frame = PlotFrame(low=0, high=highest, ticks=byte_ticks(highest), below=below, height=_HEIGHT)
    return element(
        "figure",
        element("figcaption", element("b", case.name), f" peak {bytes_text(peak.total_bytes)}, {peak.at}"),
        area_plot(
            [{name: entry.num_bytes.get(name, 0) for name in CATEGORIES} for entry, _ in rows],
            titles=[_title(entry, other) for entry, other in rows],
            line=[None if other is None else other.total_bytes for _, other in rows],
            frame=frame,
            describe=f"Memory of {case.name} through one step, by category",
        ),
    )


def _title(entry: LedgerEntry, other: LedgerEntry | None) -> str:
    parts = [f"{name} {bytes_text(size)}" for name, size in entry.num_bytes.items() if size]
    if other is not None:
        parts.append(f"predicted in all {bytes_text(other.total_bytes)}")
    return "\n".join([f"{entry.at}: {bytes_text(entry.total_bytes)}", *parts])


def _step_table(case: CaseResult, ledger: MemoryLedger) -> Markup:
    rows = _rows(case, ledger)
    unit = byte_unit(max(entry.total_bytes for entry, _ in rows))
    return table(
        [f"row, {unit.name}", "live", "predicted", *CATEGORIES],
        [
            [
                entry.at,
                digits_in(entry.total_bytes, unit=unit),
                "–" if other is None else digits_in(other.total_bytes, unit=unit),
                *(digits_in(entry.num_bytes.get(name, 0), unit=unit) for name in CATEGORIES),
            ]
            for entry, other in rows
        ],
    )
