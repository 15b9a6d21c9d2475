"""Predicted memory of the trainings of captured_models.py: `python benchmarks/captured_predictions.py`.

A line for each training whose memory was measured (benchmarks/results/captured_models_h200.json), eager and captured,
and eager with compiled units: allocated and reserved bytes, predicted compared with measured. Runs without a GPU.
"""

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

from hugging_face_models import samples_of, task_of
from measuring import RESULTS as FOLDER

from shardwise.plan import Plan
from shardwise.planner import MemoryEstimate, estimate
from shardwise.planner.ways import traced_ways
from shardwise.spec import ModelSpec
from shardwise.trace import trace_task

RESULTS = FOLDER / "captured_models_h200.json"


@cache
def spec_of(name: str, backend: str) -> ModelSpec:
    task, plan = task_of(name, device="meta"), Plan(precision="bf16", compile=backend)
    bare = trace_task(task, name=name, ways=[])
    return trace_task(task, name=name, ways=[("bf16", way) for way in traced_ways(bare, plan=plan)])


def predict(name: str, *, capture: str, backend: str = "none") -> MemoryEstimate:
    plan = Plan(precision="bf16", capture=capture, compile=backend)
    # captured_models.py makes its models on the GPU.
    return estimate(spec_of(name, backend), plan=plan, num_ranks=1, batch=samples_of(name), made_on_device=True)


def measured(path: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the rows that are predicted: captured steps of compiled units are not."""
    rows = json.loads(path.read_text())["rows"]
    return [row for row in rows if row["compile"] == "none" or row["capture"] == "off"]


def compare(row: dict[str, Any]) -> dict[str, float]:
    """Return predicted / measured - 1, by total."""
    # Whether `auto` captures is not known before; here it did.
    predicted = predict(row["model"], capture="off" if row["capture"] == "off" else "on", backend=row["compile"])
    return {
        total: getattr(predicted, f"{total}_bytes") / row[f"{total}_bytes"] - 1 for total in ("allocated", "reserved")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, default=RESULTS)
    for row in measured(parser.parse_args().measured):
        errors = "  ".join(f"{total} {100 * error:+.2f}%" for total, error in compare(row).items())
        sizes = "  ".join(f"{row[f'{total}_bytes'] / 2**20:.0f}" for total in ("allocated", "reserved"))
        how = ("eager" if row["capture"] == "off" else "captured") + ("" if row["compile"] == "none" else ", compiled")
        print(f"{row['model']:12} {how:15} {sizes} MiB  {errors}", flush=True)


if __name__ == "__main__":
    main()
