"""What three estimators say of the same jobs, compared with the measured peak: ours, accelerate's and DeepSpeed's.

    python benchmarks/estimators.py benchmarks/results/validate_memory_h200.json     a table in Markdown

accelerate   `accelerate estimate-memory`, "Training using Adam": its own function, of the model's bytes in fp32. It
             knows no ranks, no batch and no activations.
DeepSpeed    the model states of ZeRO-2 (4 ψ + 16 ψ / N bytes) and ZeRO-3 (4 × the largest layer + 18 ψ / N), the
             formulas of its estimate_zero2_model_states_mem_needs and estimate_zero3_model_states_mem_needs without
             offload. They are of states, and of mixed precision; activations are left to the user.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from accelerate.commands.estimate import estimate_training_usage
from memory_predictions import predict_row

from shardwise.models.catalogue import shape_of
from shardwise.models.make import build_model

Row = dict[str, Any]
STRATEGIES = ("ddp", "zero2", "fsdp")


def accelerates(row: Row) -> int:
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[row["precision"]]
    return max(estimate_training_usage(4 * shape_of(row["model"]).num_params, dtype).values())


def deepspeeds(row: Row) -> int | None:
    num_params = shape_of(row["model"]).num_params
    if row["strategy"] == "zero2":
        return 4 * num_params + 16 * num_params // row["num_ranks"]
    if row["strategy"] == "fsdp":
        model = build_model(shape_of(row["model"]), device="meta")
        largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
        return 4 * largest + 18 * num_params // row["num_ranks"]
    return None


def table(rows: list[Row]) -> list[str]:
    lines = ["| model | job | measured | ours | accelerate | DeepSpeed |", "|---|---|---|---|---|---|"]
    for row in rows:
        measured = row["allocated_bytes"]
        estimates = (predict_row(row).allocated_bytes, accelerates(row), deepspeeds(row))
        told = [f"{e / 2**30:.1f} ({e / measured - 1:+.1%})" if e is not None else "–" for e in estimates]
        recompute = ", recompute" if row["recompute"] == "full" else ""
        size = f"{row['batch']} × {row['seq'] or row['image']}"
        job = f"`{row['strategy']}` on {row['num_ranks']}, {row['precision']}{recompute}, {size}"
        lines.append(f"| {row['model']} | {job} | {measured / 2**30:.1f} | {' | '.join(told)} |")
    return lines


def chosen_rows(path: Path) -> list[Row]:
    """Of what was measured, the first row of each model and strategy."""
    chosen: dict[tuple[str, str], Row] = {}
    for row in json.loads(path.read_text())["rows"]:
        if row["engine"] == "shardwise" and row["strategy"] in STRATEGIES and not row["error"]:
            chosen.setdefault((row["model"], row["strategy"]), row)
    return sorted(chosen.values(), key=lambda row: (row["model"], STRATEGIES.index(row["strategy"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    print("\n".join(table(chosen_rows(parser.parse_args().measured))))


if __name__ == "__main__":
    main()
