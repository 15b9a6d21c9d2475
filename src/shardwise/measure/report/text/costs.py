"""Candidates of the planner as JSON, and as a table with bars."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from shardwise.base.vocabulary.categories import ACTIVATIONS, CATEGORIES, OTHER
from shardwise.base.vocabulary.quantities import GIB, MIB, byte_unit, digits, fixed, step_seconds_text, table_rate
from shardwise.measure.report.text.plain_table import bar, plain_table
from shardwise.planner.search.candidates import Candidate

if TYPE_CHECKING:
    from shardwise.planner.search.scale import Scaled

_BAR_WIDTH = 16
_COLOURS = {"yes": "green", "tight": "yellow", "no": "red", "unknown": "bright_black"}


def as_data(candidate: Candidate) -> dict[str, Any]:
    """Return one candidate for JSON; what cannot be predicted is null."""
    plan, memory, time = candidate.plan, candidate.memory, candidate.time
    assert plan.mesh is not None

    def timed(*names: str) -> dict[str, Any]:
        return {name: getattr(time, name) if time else None for name in names}

    return {
        "strategy": candidate.name,
        "mesh": {"replicate": plan.mesh.replicate, "shard": plan.mesh.shard},
        "across": plan.across,
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
        "host_bytes": memory.host_bytes,
        "peak_at": memory.peak_at,
        "breakdown_bytes": {
            name: None if name == ACTIVATIONS and not memory.activations_known else memory.breakdown_bytes[name]
            for name in CATEGORIES
        },
        **timed("step_seconds", "samples_per_s", "tokens_per_s_per_gpu", "mfu"),
        "comm_bytes_per_step": candidate.sent_bytes,
        **timed("exposed_comm_seconds", "straggler_seconds"),
        "error_band": {"memory": candidate.memory_band, "time": candidate.time_band.value if time else None},
        "step_seconds_range": _range(candidate),
        "band_of_time_from": list(candidate.time_band.facts) if time else [],
        "measured": None,
    }


def _range(candidate: Candidate) -> list[float] | None:
    """Return the shortest and the longest step that the band allows."""
    if candidate.time is None:
        return None
    band, seconds = candidate.time_band, candidate.time.step_seconds
    return [seconds * (1 - band.lower), seconds * (1 + band.upper)]


def as_table(candidates: Sequence[Candidate], *, recommended: int | None, chooses_recompute: bool = False) -> Table:
    """Return a table with one row per candidate: its peak by category and its time. Unknown columns are left out."""
    has_times = any(one.time is not None for one in candidates)
    has_capacity = any(one.capacity_bytes is not None for one in candidates)
    host = ["host"] if any(one.memory.host_bytes for one in candidates) else []
    has_tokens = any(one.time is not None and one.time.tokens_per_s_per_gpu is not None for one in candidates)
    unit = byte_unit(max(one.memory.device_bytes for one in candidates), among=(MIB, GIB))
    times = ["step s", "tok/s/GPU" if has_tokens else "samples/s", "comm"] if has_times else []
    bars = "peak of capacity" if has_capacity else "peak by category"
    width = _BAR_WIDTH
    if chooses_recompute:
        # So that the table fits into 80 columns.
        has_meshes = any(" " in _name(one) for one in candidates)
        bars, width = ("capacity", 7) if has_meshes else ("of capacity", 11)
    recompute = ["recompute"] if chooses_recompute else []
    heads = ["", "strategy", *recompute, "batch", bars, unit.name, *host, *times, *(["fits"] if has_capacity else [])]
    table = plain_table(heads, right=["batch", unit.name, *host, *times], gap=1)
    for index, candidate in enumerate(candidates):
        table.add_row(
            "▶" if index == recommended else "",
            _name(candidate),
            *([_recompute(candidate)] if chooses_recompute else ()),
            str(candidate.batch),
            _bar(candidate, width=width),
            fixed(candidate.memory.device_bytes, unit=unit),
            *([fixed(candidate.memory.host_bytes, unit=unit) if candidate.memory.host_bytes else "–"] if host else ()),
            *(_times(candidate) if has_times else ()),
            *([Text(candidate.fits, style=_COLOURS[candidate.fits])] if has_capacity else ()),
        )
    return table


def _name(candidate: Candidate) -> str:
    mesh = candidate.plan.mesh
    assert mesh is not None
    across = f"+{candidate.plan.across}" if candidate.plan.is_sharded_across else ""
    return candidate.name + (f" {mesh}{across}" if mesh.replicate > 1 else "")


def _recompute(candidate: Candidate) -> str:
    """Return what a plan recomputes; the solver's may differ by unit."""
    plan = candidate.plan
    return "by unit" if plan.recompute_overrides else plan.recompute


def _times(candidate: Candidate) -> tuple[str, str, str]:
    time = candidate.time
    if time is None:
        return "?", "?", "?"
    rate = time.samples_per_s if time.tokens_per_s_per_gpu is None else time.tokens_per_s_per_gpu
    return step_seconds_text(time.step_seconds), digits(rate), f"{time.exposed_comm_seconds / time.step_seconds:.0%}"


def scaling_table(rows: "Sequence[Scaled]") -> Table:
    """Return a table with one row per number of devices."""
    counted = "tokens" if any(row.candidate.seq is not None for row in rows) else "samples"
    heads = ("devices", "best plan", "batch", f"{counted}/step", GIB.name, "step s", f"{counted}/s", "eff.", "comm")
    table = plain_table(heads, right=(heads[0], *heads[2:]), gap=1)
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


def scaling_data(rows: "Sequence[Scaled]") -> list[dict[str, Any]]:
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


def _bar(candidate: Candidate, *, width: int) -> Text:
    """Draw all memory of the device by category, as a share of its capacity."""
    memory = candidate.memory
    outside = memory.device_bytes - memory.allocated_bytes
    parts = {**memory.breakdown_bytes, OTHER: memory.breakdown_bytes[OTHER] + outside}
    return bar(parts, capacity=candidate.capacity_bytes or memory.device_bytes, width=width)
