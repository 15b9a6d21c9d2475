"""Auto plans against fixed ones within memory budgets, on one GPU and one NCCL rank.

    python benchmarks/auto_budgets.py solve    plans.json     chooses the plans; needs no GPU
    python benchmarks/auto_budgets.py measure  plans.json     runs them; writes results/auto_budgets_h200.json

For each model the budget is 40, 60 and 80% of what it is predicted to need at a reference batch if nothing is
recomputed. Within it run: the auto plan; of the fixed plans (strategy × recompute, each at the largest micro-batch that
fits) the three that are predicted to be fastest; and two others, drawn at random. On one rank sharding frees next to
nothing, so what there is to choose is recompute and micro-batch. Weights are random; bf16, fused AdamW, no capture.

    samples_per_s    of steps that follow on each other, after warm-up
    device_bytes     the peak of what is reserved, and what else is in use on the device: context, communicators
"""

import argparse
import gc
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from captured_models import CONFIGS, MODELS, used_bytes
from torch import Tensor, nn

from shardwise.hardware import cluster_of
from shardwise.placement import STRATEGIES
from shardwise.plan import Plan
from shardwise.planner.search.auto import RECOMPUTES, AutoRequest, solve_plan, with_budget
from shardwise.planner.search.candidates import Candidate, candidates, cost
from shardwise.tasks import Task, load_task
from shardwise.trace import trace_task

RESULTS = Path(__file__).parent / "results"
SHARES = (0.4, 0.6, 0.8)
# Model → the batch at which the peak without recompute is taken.
BATCHES = {"llama-1b": 8, "vit-large": 128, "bert-large": 64}
BASE = Plan(precision="bf16", capture="off")
OPTIMIZER = "adamw-fused"
_SECONDS, _MOST_STEPS = 0.8, 12


def task_of(name: str, *, device: str) -> Task:
    if name not in MODELS:
        return load_task(name, device=device)
    import transformers

    kind, _, seq, config = MODELS[name]
    made = getattr(transformers, CONFIGS[kind])(**config)
    with torch.device(device):
        model = getattr(transformers, kind)._from_config(made, attn_implementation="sdpa").float().train()

    def make_batch(size: int) -> Tensor:
        return torch.randint(5, config["vocab_size"], (size, seq), device=device)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        found: Tensor = model(input_ids=ids, labels=ids).loss
        return found

    return Task(model=model, loss=loss, make_batch=make_batch)


def solve(name: str) -> list[dict[str, Any]]:
    """The plans of one model at each budget."""
    cluster = cluster_of("1xh200")
    ways = [("bf16", recompute) for recompute in RECOMPUTES]
    spec = trace_task(task_of(name, device="meta"), name=name, ways=ways)
    whole = cost(
        spec, plan=replace(BASE, strategy="ddp", micro_batch=BATCHES[name]), cluster=cluster, optimizer=OPTIMIZER
    )
    draw, cases = random.Random(0), []
    for share in SHARES:
        budget = round(share * whole.memory.device_bytes)
        request = AutoRequest(plan=BASE, cluster=cluster, optimizer=OPTIMIZER, budget_bytes=budget)
        auto = solve_plan(lambda plan: spec, request=request).candidate
        fixed = [
            one
            for recompute in RECOMPUTES
            for one in candidates(
                lambda plan: spec,
                plan=replace(BASE, recompute=recompute),
                strategies=tuple(STRATEGIES),
                cluster=with_budget(cluster, budget_bytes=budget),
                optimizer=OPTIMIZER,
                goal="throughput",
            )
            if one.fits == "yes"
        ]
        fixed.sort(key=lambda one: -_speed(one))
        others = draw.sample(fixed[3:], min(2, len(fixed[3:])))
        rows = [("auto", auto), *(("best", one) for one in fixed[:3]), *(("random", one) for one in others)]
        cases += [
            {
                "model": name,
                "share": share,
                "budget_bytes": budget,
                "kind": kind,
                "predicted_samples_per_s": _speed(one),
                "predicted_device_bytes": one.memory.device_bytes,
                "plan": one.plan.to_dict(),
            }
            for kind, one in rows
        ]
        print(
            f"{name} {share:.0%} of {whole.memory.device_bytes / 2**30:.1f} GiB: auto {auto.plan.to_dict()}", flush=True
        )
    return cases


def _speed(candidate: Candidate) -> float:
    assert candidate.time is not None
    return candidate.time.samples_per_s


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """One plan, on this GPU; memory that it has left is given back first."""
    import shardwise

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    plan = Plan.from_dict(case["plan"])
    assert plan.micro_batch is not None
    task = task_of(case["model"], device="cuda")
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-4, fused=True)
    model, optimizer = shardwise.prepare(task.model, optimizer, plan)
    torch.cuda.reset_peak_memory_stats()
    batch = task.make_batch(plan.micro_batch)

    def step() -> None:
        task.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = _timed(step)
    return {
        **case,
        "samples_per_s": plan.micro_batch / seconds,
        "device_bytes": torch.cuda.max_memory_reserved() + used_bytes() - torch.cuda.memory_reserved(),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
    }


def _timed(step: Callable[[], None]) -> float:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    began, count = time.perf_counter(), 0
    while count < 3 or (count < _MOST_STEPS and time.perf_counter() - began < _SECONDS):
        step()
        torch.cuda.synchronize()
        count += 1
    return (time.perf_counter() - began) / count


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each model and budget: the auto plan's speed over the best fixed one's, and its peak over the budget."""
    found = []
    for model, share in dict.fromkeys((row["model"], row["share"]) for row in rows):
        own = [row for row in rows if (row["model"], row["share"]) == (model, share) and "samples_per_s" in row]
        autos, fixed = ([row for row in own if (row["kind"] == "auto") is is_auto] for is_auto in (True, False))
        if autos and fixed:
            best = max(row["samples_per_s"] for row in fixed)
            (auto,) = autos
            found.append(
                {
                    "model": model,
                    "share": share,
                    "speed_ratio": auto["samples_per_s"] / best,
                    "peak_of_budget": auto["device_bytes"] / auto["budget_bytes"],
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("solve", "measure"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--models", default=",".join(BATCHES))
    parser.add_argument("--out", type=Path, default=RESULTS / "auto_budgets_h200.json")
    asked = parser.parse_args()
    if asked.action == "solve":
        cases: list[dict[str, Any]] = []
        for name in asked.models.split(","):
            cases += solve(name)
            asked.file.write_text(json.dumps(cases, indent=1) + "\n")
        return
    rows = []
    for case in json.loads(asked.file.read_text()):
        try:
            rows.append(measure(case))
        except torch.OutOfMemoryError as error:
            rows.append({**case, "failed": str(error).splitlines()[0]})
        row = rows[-1]
        print(
            f"{row['model']} {row['share']:.0%} {row['kind']} {row['plan']['strategy']} {row['plan']['recompute']} "
            f"{row['plan']['micro_batch']}: {row.get('samples_per_s', 0):.2f} samples/s (predicted "
            f"{row['predicted_samples_per_s']:.2f}), {row.get('device_bytes', 0) / row['budget_bytes']:.3f} of budget",
            flush=True,
        )
        data = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "summary": summary(rows),
            "rows": rows,
        }
        asked.out.write_text(json.dumps(data, indent=1) + "\n")
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
