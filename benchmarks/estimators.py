"""What the estimators that people use say of the same jobs, compared with measured peaks of allocated memory.

    python benchmarks/estimators.py [--published DIR]     tables in Markdown

Rows are our own on one H200 (results/validate_memory_h200.json), both engines, and of DIR those with a peak.

accelerate   `accelerate estimate-memory`, "Training using Adam": its own function, of the model's bytes in fp32. It
             knows no ranks, no batch and no activations.
DeepSpeed    the model states of ZeRO-2 (4 ψ + 16 ψ / N bytes) and ZeRO-3 (4 × the largest layer + 18 ψ / N), the
             formulas of its estimate_zero2_model_states_mem_needs and estimate_zero3_model_states_mem_needs without
             offload. They are of states, and of mixed precision; activations are left to the user.
playbook     the Ultra-Scale Playbook: 2 + 2 + 12 bytes per parameter in mixed precision (4 + 4 + 8 in fp32), sharded as
             the strategy says, and activations by Korthikanti et al. (arXiv 2205.05198): of a layer
             s·b·h·34 + 5·a·s²·b bytes in 16 bits; recomputed in full, 2·s·b·h.
Primus       AMD Primus, `projection memory`: 4 + 10 / N bytes per parameter, and what a layer keeps by its module
             profilers, in bf16. Its launcher does not run here, so this is by its formulas; what it projects of time
             needs a benchmark on its GPUs, or their simulator, and is left out.
torchtitan   its estimation is torch's FSDPMemTracker on fake tensors, for fully_shard alone (torchtitan_estimate.py):
             of language models under torch's engine with sharded parameters.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.commands.estimate import estimate_training_usage
from memory_predictions import predict_row
from published_memory import published
from torchtitan_estimate import torchtitans
from validate_time import spec_of

from shardwise.models.catalogue import shape_of
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape, LlamaShape

Row = dict[str, Any]
MEASURED = Path(__file__).parent / "results" / "validate_memory_h200.json"
STRATEGIES = ("ddp", "zero2", "fsdp")
_SHARDED = {"ddp": (), "zero1": ("optim",), "zero2": ("optim", "grads")}


def ours(row: Row) -> float:
    return predict_row(row).allocated_bytes


def accelerates(row: Row) -> float:
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[row["precision"]]
    return float(max(estimate_training_usage(4 * shape_of(row["model"]).num_params, dtype).values()))


def deepspeeds(row: Row) -> float | None:
    num_params = shape_of(row["model"]).num_params
    if row["strategy"] == "zero2":
        return 4 * num_params + 16 * num_params // row["num_ranks"]
    if row["strategy"] == "fsdp":
        model = build_model(shape_of(row["model"]), device="meta")
        largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
        return 4 * largest + 18 * num_params // row["num_ranks"]
    return None


def playbooks(row: Row) -> float | None:
    shape = shape_of(row["model"])
    if not isinstance(shape, GPTShape | LlamaShape):
        return None
    is_mixed = row["precision"] == "bf16"
    sizes = {"params": 2, "grads": 2, "optim": 12} if is_mixed else {"params": 4, "grads": 4, "optim": 8}
    sharded = _SHARDED.get(row["strategy"], tuple(sizes))
    per_param = sum(size / (row["num_ranks"] if name in sharded else 1) for name, size in sizes.items())
    tokens, wide = row["batch"] * row["seq"], 1 if is_mixed else 2
    layer = wide * (34 * tokens * shape.width + 5 * shape.num_heads * row["seq"] * tokens)
    activations = layer if row["recompute"] == "none" else wide * 2 * tokens * shape.width
    return per_param * shape.num_params + shape.num_layers * activations


def primus(row: Row) -> float | None:
    shape = shape_of(row["model"])
    if not isinstance(shape, GPTShape | LlamaShape) or (row["precision"], row["recompute"]) != ("bf16", "none"):
        return None
    is_llama = isinstance(shape, LlamaShape)
    keys = shape.width * shape.num_kv_heads // shape.num_heads if isinstance(shape, LlamaShape) else shape.width
    hidden = shape.ffn_width if isinstance(shape, LlamaShape) else 4 * shape.width
    attention = 2 * shape.width + 2 * keys + shape.width
    mlp = (3 if is_llama else 2) * hidden + shape.width
    kept = 2 * row["batch"] * row["seq"] * (attention + mlp + 2 * shape.width)
    return (4 + 10 / row["num_ranks"]) * shape.num_params + shape.num_layers * kept


ESTIMATORS: dict[str, Callable[[Row], float | None]] = {
    "ours": ours,
    "accelerate": accelerates,
    "DeepSpeed": deepspeeds,
    "playbook": playbooks,
    "Primus": primus,
}
# The table of chosen rows has our engine alone, of which torchtitan knows nothing.
SUMMARISED = {**ESTIMATORS, "torchtitan": torchtitans}


@dataclass(frozen=True, slots=True)
class Error:
    """`share`: estimate / measured − 1."""

    estimator: str
    share: float


def errors(rows: Sequence[Row], estimators: dict[str, Callable[[Row], float | None]]) -> Iterator[Error]:
    for row in rows:
        for name, function in estimators.items():
            found = function(row)
            if found is not None:
                yield Error(name, found / row["allocated_bytes"] - 1)


def published_errors(folder: Path) -> Iterator[Error]:
    """Of published rows with a peak; accelerate's is of the model's bytes in the dtype of each."""
    for one in published(folder):
        assert one.row.peak_bytes is not None
        yield Error("ours", one.memory_error)
        num_bytes = 4 * sum(param.num_elements for unit in spec_of(one.row).units for param in unit.params)
        dtype = "float32" if one.row.plan.precision == "fp32" else "bfloat16"
        yield Error("accelerate", max(estimate_training_usage(num_bytes, dtype).values()) / one.row.peak_bytes - 1)


def summary(found: Sequence[Error]) -> Iterator[str]:
    yield "| estimator | jobs | median error | within 10% | largest |"
    yield "|---|---|---|---|---|"
    for name in dict.fromkeys(error.estimator for error in found):
        shares = [error.share for error in found if error.estimator == name]
        close = sum(abs(share) <= 0.1 for share in shares)
        median = statistics.median(map(abs, shares))
        yield f"| {name} | {len(shares)} | {median:.1%} | {close} of {len(shares)} | {max(shares, key=abs):+.0%} |"


def table(rows: Sequence[Row]) -> list[str]:
    names = list(ESTIMATORS)
    lines = [f"| model | job | measured | {' | '.join(names)} |", "|---" * (len(names) + 3) + "|"]
    for row in rows:
        measured = row["allocated_bytes"]
        estimates = [function(row) for function in ESTIMATORS.values()]
        told = [f"{e / 2**30:.1f} ({e / measured - 1:+.1%})" if e is not None else "–" for e in estimates]
        recompute = ", recompute" if row["recompute"] == "full" else ""
        size = f"{row['batch']} × {row['seq'] or row['image']}"
        job = f"`{row['strategy']}` on {row['num_ranks']}, {row['precision']}{recompute}, {size}"
        lines.append(f"| {row['model']} | {job} | {measured / 2**30:.1f} | {' | '.join(told)} |")
    return lines


def measured_rows() -> list[Row]:
    rows: list[Row] = json.loads(MEASURED.read_text())["rows"]
    return [row for row in rows if not row["error"]]


def chosen_rows() -> list[Row]:
    """Of what was measured, the first row of each model and strategy."""
    chosen: dict[tuple[str, str], Row] = {}
    for row in measured_rows():
        if row["engine"] == "shardwise" and row["strategy"] in STRATEGIES:
            chosen.setdefault((row["model"], row["strategy"]), row)
    return sorted(chosen.values(), key=lambda row: (row["model"], STRATEGIES.index(row["strategy"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path, help="the folder of published tables")
    arguments = parser.parse_args()
    print("\n".join(summary(list(errors(measured_rows(), SUMMARISED)))))
    if arguments.published:
        print("\n".join(["", "Published peaks:", "", *summary(list(published_errors(arguments.published)))]))
    print("\n".join(["", *table(chosen_rows())]))


if __name__ == "__main__":
    main()
