"""Candidates of the planner as JSON, and as a table with bars."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwise.planner.replay import CATEGORIES
from shardwise.planner.search import Candidate

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_GIB = 2**30
_BAR_WIDTH = 24
_STYLES = {
    "params": "blue",
    "gathered": "cyan",
    "grads": "magenta",
    "reduce": "bright_magenta",
    "optim": "green",
    "activations": "yellow",
    "other": "bright_black",
}
_LETTERS = {"params": "P", "gathered": "W", "grads": "G", "reduce": "R", "optim": "O", "activations": "A", "other": "x"}
_VERDICTS = {"yes": "green", "tight": "yellow", "no": "red", "unknown": "bright_black"}


def as_data(candidate: Candidate) -> dict[str, Any]:
    """One candidate in JSON's own types; what is not predicted yet is null."""
    plan, memory = candidate.plan, candidate.memory
    assert plan.mesh is not None
    return {
        "strategy": plan.strategy,
        "mesh": {"replicate": plan.mesh.replicate, "shard": plan.mesh.shard},
        "engine": plan.engine,
        "micro_batch": candidate.batch,
        "seq": candidate.seq,
        "precision": plan.precision,
        "recompute": plan.recompute,
        "fits": candidate.fits,
        "capacity_bytes": candidate.capacity_bytes,
        "peak_bytes": {
            "allocated": memory.allocated_bytes,
            "reserved": memory.reserved_bytes,
            "device": memory.device_bytes,
        },
        "peak_at": memory.peak_at,
        "breakdown_bytes": {
            name: None if name == "activations" and not memory.activations_known else memory.breakdown_bytes[name]
            for name in CATEGORIES
        },
        "step_seconds": None,
        "samples_per_s": None,
        "tokens_per_s_per_gpu": None,
        "mfu": None,
        "comm_bytes_per_step": candidate.sent_bytes,
        "exposed_comm_seconds": None,
        "error_band": {"memory": candidate.error_band, "time": None},
        "measured": None,
    }


def as_table(candidates: Sequence[Candidate], *, recommended: int | None) -> "Table":
    """A row a candidate: its peak against the capacity, by category."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "strategy", "micro-batch", "peak, of the capacity", "GiB", "all ranks", "fits"):
        table.add_column(
            column, justify="right" if column in ("micro-batch", "GiB", "all ranks") else "left", no_wrap=True
        )
    for index, candidate in enumerate(candidates):
        device_bytes = candidate.memory.device_bytes
        table.add_row(
            "▶" if index == recommended else "",
            candidate.plan.strategy,
            str(candidate.batch),
            _bar(candidate),
            f"{device_bytes / _GIB:.1f}",
            f"{device_bytes * candidate.cluster.num_ranks / _GIB:,.0f}",
            _verdict(candidate),
        )
    return table


def _verdict(candidate: Candidate) -> "Text":
    from rich.text import Text

    return Text(candidate.fits, style=_VERDICTS[candidate.fits])


def _bar(candidate: Candidate) -> "Text":
    """A letter a category, and dots up to the capacity; what goes beyond it is cut off with a sign."""
    from rich.text import Text

    memory = candidate.memory
    capacity = candidate.capacity_bytes or memory.device_bytes
    outside = memory.device_bytes - memory.allocated_bytes
    parts = {**memory.breakdown_bytes, "other": memory.breakdown_bytes["other"] + outside}
    text = Text()
    end = 0
    for name in CATEGORIES:
        start, end = end, end + parts[name]
        length = round(end * _BAR_WIDTH / capacity) - round(start * _BAR_WIDTH / capacity)
        text.append(_LETTERS[name] * length, style=_STYLES[name])
    if len(text) > _BAR_WIDTH:
        text.truncate(_BAR_WIDTH)
        text.append("»", style="red")
        return text
    text.append("·" * (_BAR_WIDTH - len(text)), style="bright_black")
    return text


def legend() -> "Text":
    """The letters of the bars."""
    from rich.text import Text

    text = Text()
    for name in CATEGORIES:
        text.append(f"{_LETTERS[name]} ", style=_STYLES[name])
        text.append(f"{name}  ")
    return text
