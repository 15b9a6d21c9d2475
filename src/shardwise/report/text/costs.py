"""Candidates of the planner as JSON, and as a table with bars."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from shardwise.planner.search.candidates import Candidate
from shardwise.planner.search.scale import Scaled
from shardwise.report.text import category_bars
from shardwise.vocabulary.categories import ACTIVATIONS, CATEGORIES, OTHER
from shardwise.vocabulary.quantities import GIB, MIB, byte_unit, digits, fixed, step_seconds_text, table_rate

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_BAR_WIDTH = 16
_VERDICTS = {"yes": "green", "tight": "yellow", "no": "red", "unknown": "bright_black"}


def as_data(candidate: Candidate) -> dict[str, Any]:
    """One candidate in JSON's own types; what cannot be predicted is null."""
    plan, memory, time = candidate.plan, candidate.memory, candidate.time
    assert plan.mesh is not None
    return {
        "strategy": candidate.name,
        "mesh": {"replicate": plan.mesh.replicate, "shard": plan.mesh.shard},
        "engine": plan.engine,
        "micro_batch": candidate.batch,
        "accumulate": plan.accumulate,
        "seq": candidate.seq,
        "precision": plan.precision,
        "recompute": plan.recompute,
        "plan": plan.to_dict(),
        "compile": plan.compile,
        "fits": candidate.fits,
        "capacity_bytes": candidate.capacity_bytes,
        "peak_bytes": {
            "allocated": memory.allocated_bytes,
            "reserved": memory.reserved_bytes,
            "device": memory.device_bytes,
        },
        "peak_at": memory.peak_at,
        "breakdown_bytes": {
            name: None if name == ACTIVATIONS and not memory.activations_known else memory.breakdown_bytes[name]
            for name in CATEGORIES
        },
        "step_seconds": time.step_seconds if time else None,
        "samples_per_s": time.samples_per_s if time else None,
        "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu if time else None,
        "mfu": time.mfu if time else None,
        "comm_bytes_per_step": candidate.sent_bytes,
        "exposed_comm_seconds": time.exposed_comm_seconds if time else None,
        "straggler_seconds": time.straggler_seconds if time else None,
        "error_band": {"memory": candidate.memory_band, "time": candidate.time_band.value if time else None},
        "band_of_time_from": list(candidate.time_band.facts) if time else [],
        "measured": None,
    }


def as_table(candidates: Sequence[Candidate], *, recommended: int | None) -> "Table":
    """One row per candidate: its peak by category and its time. A column in which nothing is known is left out."""
    from rich.table import Table

    has_times = any(one.time is not None for one in candidates)
    has_capacity = any(one.capacity_bytes is not None for one in candidates)
    has_tokens = any(one.time is not None and one.time.tokens_per_s_per_gpu is not None for one in candidates)
    unit = byte_unit(max(one.memory.device_bytes for one in candidates), among=(MIB, GIB))
    columns: dict[str, Literal["left", "right"]] = {
        "": "left",
        "strategy": "left",
        "batch": "right",
        "peak of capacity" if has_capacity else "peak by category": "left",
        unit.name: "right",
    }
    if has_times:
        columns |= {"step s": "right", "tok/s/GPU" if has_tokens else "samples/s": "right", "comm": "right"}
    if has_capacity:
        columns["fits"] = "left"
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for column, justify in columns.items():
        table.add_column(column, justify=justify, no_wrap=True)
    for index, candidate in enumerate(candidates):
        table.add_row(
            "▶" if index == recommended else "",
            _name(candidate),
            str(candidate.batch),
            _bar(candidate),
            fixed(candidate.memory.device_bytes, unit=unit),
            *(_times(candidate) if has_times else ()),
            *((_verdict(candidate),) if has_capacity else ()),
        )
    return table


def _name(candidate: Candidate) -> str:
    mesh = candidate.plan.mesh
    assert mesh is not None
    return candidate.name + (f" {mesh}" if mesh.replicate > 1 else "")


def _times(candidate: Candidate) -> tuple[str, str, str]:
    """Step, throughput, exposed communication."""
    time = candidate.time
    if time is None:
        return "?", "?", "?"
    rate = time.samples_per_s if time.tokens_per_s_per_gpu is None else time.tokens_per_s_per_gpu
    return step_seconds_text(time.step_seconds), digits(rate), f"{time.exposed_comm_seconds / time.step_seconds:.0%}"


def scaling_table(rows: Sequence[Scaled]) -> "Table":
    """One row per number of devices."""
    from rich.table import Table

    has_tokens = any(row.candidate.seq is not None for row in rows)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    counted = "tokens" if has_tokens else "samples"
    columns = ("devices", "best plan", "batch", f"{counted}/step", GIB.name, "step s", f"{counted}/s", "eff.", "comm")
    for column in columns:
        table.add_column(column, justify="left" if column == "best plan" else "right", no_wrap=True)
    for row in rows:
        candidate, time = row.candidate, row.candidate.time
        assert time is not None
        table.add_row(
            f"{row.num_ranks:,}",
            _name(candidate),
            str(candidate.batch),
            table_rate(row.global_batch * (candidate.seq or 1)),
            fixed(candidate.memory.device_bytes, unit=GIB),
            step_seconds_text(time.step_seconds),
            table_rate(time.samples_per_s * (candidate.seq or 1)),
            f"{row.efficiency:.0%}",
            f"{time.exposed_comm_seconds / time.step_seconds:.0%}",
        )
    return table


def scaling_data(rows: Sequence[Scaled]) -> list[dict[str, Any]]:
    return [
        {
            "num_ranks": row.num_ranks,
            "efficiency": row.efficiency,
            "global_batch": row.global_batch,
            "global_batch_tokens": row.global_batch * row.candidate.seq if row.candidate.seq is not None else None,
            **as_data(row.candidate),
        }
        for row in rows
    ]


def _verdict(candidate: Candidate) -> "Text":
    from rich.text import Text

    return Text(candidate.fits, style=_VERDICTS[candidate.fits])


def _bar(candidate: Candidate) -> "Text":
    """Everything on the device, by category, as a share of its capacity."""
    memory = candidate.memory
    outside = memory.device_bytes - memory.allocated_bytes
    parts = {**memory.breakdown_bytes, OTHER: memory.breakdown_bytes[OTHER] + outside}
    return category_bars.bar(parts, capacity=candidate.capacity_bytes or memory.device_bytes, width=_BAR_WIDTH)


def legend() -> "Text":
    """The letters of the bars."""
    return category_bars.legend()
