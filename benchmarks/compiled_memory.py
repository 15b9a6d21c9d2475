"""The memory of compiled units, predicted and measured on one GPU.

    python benchmarks/compiled_memory.py compare    predicts what was measured; needs no GPU
    python benchmarks/compiled_memory.py measure    runs CASES, each in a process of its own; writes
                                                    results/compiled_memory_h200.json, and compares

Compared are the rows of that file, if it is there, and the ordinary steps of results/captured_models_inductor_h200.json
(benchmarks/captured_models.py --compile inductor). Weights are random; bf16, fused AdamW, no capture. Llama-8B is
rehearsed as rank 0 of 8 without the others.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from auto_budgets import RESULTS, measured_by, waiting
from budget_plans import BASE, OPTIMIZER, task_of
from captured_models import MODELS

from shardwise.plan import Plan
from shardwise.planner.memory.peak import estimate
from shardwise.planner.ways import traced_ways
from shardwise.spec import ModelSpec
from shardwise.trace import trace_task

OUT = RESULTS / "compiled_memory_h200.json"
ORDINARY = replace(BASE, capture="off")
# (model, ranks, micro-batch, strategy, recompute)
CASES = (
    ("llama-8b", 8, 2, "fsdp", "none"),
    ("llama-8b", 8, 4, "fsdp", "full"),
    ("llama-1b", 1, 3, "ddp", "none"),
    ("llama-1b", 1, 4, "ddp", "full"),
    ("vit-large", 1, 85, "ddp", "none"),
    ("vit-large", 1, 128, "ddp", "full"),
    ("bert-large", 1, 49, "ddp", "none"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPeak:
    """What a plan took; `made_on_device`: the model was, before it was prepared."""

    model: str
    num_ranks: int
    plan: Plan
    allocated_bytes: int
    reserved_bytes: int
    made_on_device: bool = False


def measure() -> None:
    rows = []
    for model, num_ranks, micro_batch, strategy, recompute in CASES:
        for backend in ("none", "inductor"):
            plan = replace(ORDINARY, strategy=strategy, micro_batch=micro_batch, recompute=recompute, compile=backend)
            case = {"model": model, "num_ranks": num_ranks, "kind": "fixed", "plan": plan.to_dict()}
            (row,) = measured_by(waiting(), [case])
            rows.append(row)
            print(row, flush=True)
            OUT.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def measured() -> Iterator[MeasuredPeak]:
    rows: list[dict[str, Any]] = json.loads(OUT.read_text())["rows"] if OUT.is_file() else []
    for row in rows:
        if "failed" not in row:
            yield MeasuredPeak(
                model=row["model"],
                num_ranks=row["num_ranks"],
                plan=Plan.from_dict(row["plan"]),
                allocated_bytes=row["allocated_bytes"],
                reserved_bytes=row["reserved_bytes"],
            )
    for row in json.loads((RESULTS / "captured_models_inductor_h200.json").read_text())["rows"]:
        if row["capture"] == "off":
            yield MeasuredPeak(
                model=row["model"],
                num_ranks=1,
                plan=replace(ORDINARY, strategy="fsdp", micro_batch=MODELS[row["model"]][1], compile=row["compile"]),
                allocated_bytes=row["allocated_bytes"],
                reserved_bytes=row["reserved_bytes"],
                made_on_device=True,
            )


def compare() -> None:
    print("GiB, predicted / measured: allocated, reserved")
    specs: dict[str, ModelSpec] = {}
    for peak in measured():
        spec = specs[peak.model] = _with_traces(peak.model, specs.get(peak.model), plan=peak.plan)
        assert peak.plan.micro_batch is not None
        found = estimate(
            spec,
            plan=peak.plan,
            num_ranks=peak.num_ranks,
            batch=peak.plan.micro_batch,
            optimizer=OPTIMIZER,
            made_on_device=peak.made_on_device,
        )
        print(
            f"{peak.model:11} {peak.num_ranks} {peak.plan.strategy:4} batch {peak.plan.micro_batch:3} recompute "
            f"{peak.plan.recompute:5} compile {peak.plan.compile:9}"
            f"{_pair(found.allocated_bytes, peak.allocated_bytes)}  {_pair(found.reserved_bytes, peak.reserved_bytes)}",
            flush=True,
        )


def _pair(predicted: int, found: int) -> str:
    return f"{predicted / 2**30:6.2f} / {found / 2**30:5.2f} {100 * (predicted / found - 1):+5.1f}%"


def _with_traces(model: str, spec: ModelSpec | None, *, plan: Plan) -> ModelSpec:
    """The spec with the traces that the plan needs."""
    task = task_of(model, device="meta")
    spec = spec or trace_task(task, name=model, ways=[])
    missing = [way for way in traced_ways(spec, plan=plan) if spec.trace(computes_in="bf16", recompute=way) is None]
    more = trace_task(task, name=model, ways=[("bf16", way) for way in missing])
    return replace(more, traces=(*spec.traces, *more.traces)) if missing else spec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("compare", "measure"))
    if parser.parse_args().action == "measure":
        measure()
    compare()


if __name__ == "__main__":
    main()
