"""The calibration of the H200 that ships with the package, from what was measured on one.

    python benchmarks/fit_h200.py

From results/calibrate_h200.json (`python -m shardwise.hardware.calibrate --rows`) and, for kernels that had no probe of
their own when it was measured, from the profiles in results/step_times_h200.json: strided copies, casts to 16 bits and
the update in real steps.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.hardware.device_file import device_table, write_table
from shardwise.models.catalogue import shape_of
from shardwise.models.shapes import GPTShape, ViTShape
from shardwise.spec.ready import ready_spec

RESULTS = Path(__file__).parent / "results"
SHIPPED = Path(__file__).parent.parent / "src/shardwise/hardware/calibrated/h200.toml"

Row = dict[str, Any]


def write(path: Path) -> str:
    """Write the calibration; says what it is made of."""
    measured = json.loads((RESULTS / "calibrate_h200.json").read_text())
    profiles = json.loads((RESULTS / "step_times_h200.json").read_text())["profiles"]
    rows = [row for row in measured["rows"] if row["name"] not in ("transpose", "cast")]
    # A cast to fp32 was the only one.
    widened = [row | {"name": "widen"} for row in measured["rows"] if row["name"] == "cast"]
    updates = [row for row in rows if (row["name"], row.get("role")) == ("update", "adamw-fused")]
    seen = [row for profile in profiles for row in rows_of(profile, widened=widened)]
    largest = max(updates, key=lambda row: row["num_elements"])
    rows = [row for row in rows if row is not largest]
    table = device_table(measured | {"rows": [*rows, *widened, *seen]})
    calibration = table["device"]["calibration"]
    calibration["source"] += ": benchmarks/results/calibrate_h200.json, and profiles in step_times_h200.json"
    write_table({"calibration": calibration}, path, by="python benchmarks/fit_h200.py")
    return f"{len(rows)} rows, and {len(seen)} of profiles"


def rows_of(profile: Row, *, widened: list[Row]) -> Iterator[Row]:
    """What a profiled step tells of kernels without a probe."""
    shape = shape_of(profile["model"])
    if isinstance(shape, GPTShape | ViTShape):
        seq = profile["seq"] or (shape.image_size // shape.patch_size) ** 2 + 1
        dims = [3 * profile["batch"] * seq, shape.width]
        for name, op in (("stack", "aten::cat"), ("transpose", "aten::copy_")):
            found = [
                row
                for row in profile["ops"]
                if row["op"] == op
                and row["count"] >= shape.num_layers
                and (name == "stack" or len(row["shapes"][0]) == 5)
            ]
            for row in found:
                yield probe_row(name, dims, seconds=row["device_seconds"] / row["count"])
        yield from narrowed(profile, widened=widened)
    if profile["model"] == "gpt-1.3b" and profile["batch"] == 8:
        yield from updated(profile)


def narrowed(profile: Row, *, widened: list[Row]) -> Iterator[Row]:
    """The logits are cast to fp32 and their gradients back: two casts, of which one was measured alone."""
    for row in profile["ops"]:
        for wide in widened:
            if row["op"] == "aten::copy_" and row["shapes"] == [wide["dims"], wide["dims"]]:
                yield probe_row("narrow", wide["dims"], seconds=row["device_seconds"] - wide["seconds"])


def updated(profile: Row) -> Iterator[Row]:
    """A step of fused AdamW over a model's parameters."""
    spec = ready_spec(profile["model"], ways=())
    assert spec is not None
    (seconds,) = [row["device_seconds"] for row in profile["ops"] if row["op"] == "aten::_fused_adamw_"]
    yield {
        "name": "update",
        "role": "adamw-fused",
        "num_tensors": 8,
        "num_elements": spec.num_params,
        "launch": 0.0,
        "seconds": seconds,
    }


def probe_row(name: str, dims: list[int], *, seconds: float) -> Row:
    return {"name": name, "dtype": "bf16", "dims": dims, "role": "", "cold": True, "seconds": seconds}


if __name__ == "__main__":
    print(f"{SHIPPED}: {write(SHIPPED)}")
