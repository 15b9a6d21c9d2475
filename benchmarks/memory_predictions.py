"""What the planner predicts for measured cases, and how far off it is; validate_memory.py --predict prints it.

Errors are predicted / measured − 1. Of one engine: the median of their sizes, and the worst.
"""

import statistics
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

from as_measured import source_as_measured

from shardwise.plan import Plan
from shardwise.planner import MemoryEstimate, estimate
from shardwise.planner.memory.constants import DEFAULT_COMMUNICATOR_BYTES
from shardwise.sources import Source

Row = dict[str, Any]

TOTALS = ("allocated", "reserved", "device")


@cache
def _source(model: str, seq: int | None, image: int | None) -> Source:
    return source_as_measured(model, seq=seq, image=image)


def predict_row(row: Row, *, device: str = "cuda") -> MemoryEstimate:
    """The planner's answer to a measured case."""
    plan = Plan(
        strategy=row["strategy"],
        precision=row["precision"],
        recompute=row["recompute"],
        engine=row["engine"],
    )
    spec = _source(row["model"], row["seq"], row["image"]).spec_for(plan)
    predicted = estimate(
        spec,
        plan=plan,
        num_ranks=row["num_ranks"],
        batch=row["batch"],
        optimizer=row["optimizer"],
        device=device,
        # In rehearsal there is no communicator.
        communicator_bytes=0 if row["absent"] else None,
    )
    # A real job's process has made one more, to measure what it takes.
    probe = 0 if row["absent"] else DEFAULT_COMMUNICATOR_BYTES
    return replace(predicted, device_bytes=predicted.device_bytes + probe)


def compare(rows: Iterable[Row]) -> list[Row]:
    """The rows that were measured, each with `predicted` and `errors`."""
    found = []
    for row in rows:
        if row["error"]:
            continue
        predicted = predict_row(row)
        errors = {
            name: getattr(predicted, f"{name}_bytes") / row[f"{name}_bytes"] - 1
            for name in TOTALS
            if row.get(f"{name}_bytes")
        }
        errors["rest"] = predicted.at_rest_bytes / row["rest_bytes"] - 1
        found.append(row | {"predicted": predicted, "errors": errors})
    return found


def report(rows: list[Row]) -> list[str]:
    """A line a case, worst first, then a line an engine and total."""
    lines = []
    for row in sorted(rows, key=lambda row: -abs(row["errors"]["allocated"])):
        size = f"{row['batch']}×{row['seq'] or row['image']}"
        parts = "  ".join(f"{name} {100 * error:+6.2f}%" for name, error in row["errors"].items())
        lines.append(
            f"{row['model']:13} {row['engine']:9} {row['strategy']:13} {row['num_ranks']:4} {row['precision']} "
            f"{row['recompute']:4} {size:8} {row['optimizer']:13} {row['allocated_bytes'] / 2**20:9.1f} MiB  {parts}  "
            f"{row['predicted'].peak_at}"
        )
    for engine in dict.fromkeys(row["engine"] for row in rows):
        for name in (*TOTALS, "rest"):
            errors = [abs(row["errors"][name]) for row in rows if row["engine"] == engine and name in row["errors"]]
            if errors:
                lines.append(
                    f"{engine:9} {name:9} of {len(errors)}: median {100 * statistics.median(errors):.2f}%, "
                    f"worst {100 * max(errors):.2f}%"
                )
    return lines
