"""Profiles, measured and predicted: as JSON, as a table, and the memory of a step as a timeline of bars."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from shardwise.base.vocabulary.categories import ACTIVATIONS, CATEGORIES, GATHERED
from shardwise.base.vocabulary.quantities import error_text, step_seconds_text, table_number, table_unit
from shardwise.measure.profile.compare import Profile
from shardwise.measure.report.text.plain_table import bar, plain_table

_BAR_WIDTH = 26
# So that a line fits into 80 columns.
_SHORT = {GATHERED: "gather", ACTIVATIONS: "activ."}


def as_data(profiles: Sequence[Profile]) -> dict[str, Any]:
    """Return all results for JSON; what was not measured is null."""
    rehearsal = profiles[0].rehearsal
    names = [found.measured.device_name for found in profiles if found.measured is not None]
    return {
        "model": rehearsal.model,
        "device": rehearsal.device,
        "device_name": names[0] if names else None,
        "ranks": rehearsal.num_ranks,
        "engine": rehearsal.plan.engine,
        "micro_batch": rehearsal.batch,
        "seq": rehearsal.seq,
        "image": rehearsal.image,
        "precision": rehearsal.plan.precision,
        "recompute": rehearsal.plan.recompute,
        "optimizer": rehearsal.optimizer,
        "rows": [_row(found) for found in profiles],
    }


def _row(found: Profile) -> dict[str, Any]:
    memory, measured = found.predicted.memory, found.measured
    ledger = None if measured is None else measured.whole_ledger
    has_cache = found.rehearsal.device != "cpu"
    return {
        "strategy": found.rehearsal.plan.strategy,
        "predicted_bytes": {
            "allocated": memory.allocated_bytes,
            "reserved": memory.reserved_bytes if has_cache else None,
            "at_rest": memory.at_rest_bytes,
            "at": memory.peak_at,
            "breakdown": dict(memory.breakdown_bytes),
        },
        "measured_bytes": None
        if measured is None or ledger is None
        else {
            "allocated": measured.allocated_bytes,
            "reserved": measured.reserved_bytes,
            "at_rest": ledger.at_rest.total_bytes,
            "at": ledger.peak.at,
            "breakdown": _reported(found, ledger.peak.num_bytes),
        },
        "error": found.error,
        "not_measured": found.why_not or None,
        "timeline": [
            {
                "at": entry.at,
                "bytes": _reported(found, entry.num_bytes),
                "reserved_bytes": entry.reserved_bytes,
                "predicted_bytes": None if predicted is None else dict(predicted.num_bytes),
            }
            for entry, predicted in found.rows()
        ],
        "step_seconds": found.step_seconds,
        "steps_seconds": None if measured is None else list(measured.step_seconds),
    }


def _reported(found: Profile, parts: Mapping[str, int]) -> dict[str, int | None]:
    """Replace the bytes of categories that the engine does not report by None."""
    return {name: None if name in found.unknown else num_bytes for name, num_bytes in parts.items()}


def as_table(profiles: Sequence[Profile]) -> Table:
    """Return a table with two lines per strategy: the measured peak by category, and the predicted one."""
    unit = table_unit(found.predicted.memory.allocated_bytes for found in profiles)
    heads = (unit.name, "peak", *(_SHORT.get(name, name) for name in CATEGORIES), "error")
    table = plain_table(heads, right=heads[1:], gap=1)

    def line(peak: int, parts: Mapping[str, int | None]) -> list[str]:
        numbers = (peak, *(parts[name] for name in CATEGORIES))
        return ["?" if number is None else table_number(number / unit.size) for number in numbers]

    for found in profiles:
        memory, measured = found.predicted.memory, found.measured
        numbers = ["not measured"]
        if measured is not None:
            peak = measured.whole_ledger.peak
            numbers = [*line(peak.total_bytes, _reported(found, peak.num_bytes)), error_text(found.error)]
        table.add_row(found.rehearsal.plan.strategy, *numbers)
        table.add_row("  predicted", *line(memory.allocated_bytes, dict(memory.breakdown_bytes)), style="bright_black")
    return table


def remark(found: Profile) -> str:
    """Say what the table does not show: the time, what the allocator holds, or why nothing was measured."""
    strategy, measured = found.rehearsal.plan.strategy, found.measured
    if measured is None:
        return f"{strategy}: not measured, since it {found.why_not}"
    parts = [] if found.step_seconds is None else [f"a step computes {step_seconds_text(found.step_seconds)} s"]
    if measured.reserved_bytes is not None:
        unit = table_unit([measured.reserved_bytes])
        predicted = found.predicted.memory.reserved_bytes
        parts.append(
            f"reserved {table_number(measured.reserved_bytes / unit.size)} {unit.name}, "
            f"predicted {table_number(predicted / unit.size)} {unit.name}"
        )
    if found.unknown:
        parts.append("buffers of torch's own engine count as activations")
    return f"{strategy}: {'; '.join(parts)}"


def as_timeline(found: Profile) -> Table:
    """Return a table with one line per row of the step: the most live bytes as a bar, measured and predicted."""
    assert found.measured is not None
    highest, peak_at = found.measured.allocated_bytes, found.measured.ledger.peak.at
    unit = table_unit([highest])
    heads = (f"{found.rehearsal.plan.strategy}, row by row", unit.name, "measured", "predicted", "")
    table = plain_table(heads, right=heads[2:4], gap=1)
    for column, width in zip(table.columns[1:4], (_BAR_WIDTH, len("measured"), len("predicted")), strict=True):
        column.min_width = width
    for entry, predicted in found.rows():
        table.add_row(
            entry.at,
            bar(entry.num_bytes, capacity=highest, width=_BAR_WIDTH),
            table_number(entry.total_bytes / unit.size),
            "?" if predicted is None else table_number(predicted.total_bytes / unit.size),
            "◀ peak" if entry.at == peak_at and entry.total_bytes == highest else "",
        )
    return table
