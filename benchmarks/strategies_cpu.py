"""Strategies on ranks of this machine's CPU: how long a step takes, compared with the planner's prediction.

    shardwise calibrate --device cpu --ranks 4 --out cpu.toml
    python benchmarks/strategies_cpu.py --cluster cpu.toml --out benchmarks/results/strategies_cpu.json

The ranks hold the model of the demo (gpt-tiny) under every strategy, and run blocks of steps in turn, so that a machine
whose load drifts slows all alike. A block counts with its slowest rank. In addition to wall-clock seconds: the seconds
that all ranks together were on a CPU, by the cores that they share: what a step would take with nobody else around.
What counts is the order: strategies that are measured to be further apart than 10% should be predicted in that order.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_step import Case, circumstances, make_step, on_ranks

from shardwise.hardware import Cluster, cluster_of
from shardwise.models.catalogue import shape_of
from shardwise.models.shapes import GPTShape
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import STRATEGIES
from shardwise.planner.time.step_time import estimate_time
from shardwise.spec.shipped import ready_spec

MODEL, BATCH, SEQ = "gpt-tiny", 2, 128
WARM_STEPS, STEPS_PER_BLOCK, NUM_BLOCKS = 2, 1, 7
APART = 0.10


def timed(case: Case, rank: int, device: torch.device, strategies: tuple[str, ...]) -> dict[str, Any]:
    """Seconds a step of each block, by strategy: by the wall, and on a CPU."""
    steps = {
        strategy: make_step(replace(case, strategy=strategy), engine="shardwise", rank=rank, device=device)
        for strategy in strategies
    }
    for step in steps.values():
        for _ in range(WARM_STEPS):
            step()
    seconds: dict[str, list[tuple[float, float]]] = {strategy: [] for strategy in strategies}
    for number in range(NUM_BLOCKS):
        for strategy in strategies if number % 2 == 0 else reversed(strategies):
            dist.all_reduce(torch.zeros(1))
            began, on_cpu = time.perf_counter(), time.process_time()
            for _ in range(STEPS_PER_BLOCK):
                steps[strategy]()
            spent = (time.perf_counter() - began, time.process_time() - on_cpu)
            seconds[strategy].append((spent[0] / STEPS_PER_BLOCK, spent[1] / STEPS_PER_BLOCK))
    return seconds


def predicted(strategy: str, *, cluster: Cluster) -> float:
    spec = ready_spec(MODEL)
    assert spec is not None
    plan = Plan(strategy=strategy, precision="fp32", micro_batch=BATCH, mesh=Mesh(replicate=1, shard=cluster.num_ranks))
    found = estimate_time(spec, plan=plan, cluster=cluster, optimizer="adamw-foreach")
    assert found is not None
    return found.step_seconds


def row_of(strategy: str, ranks: list[list[list[float]]], *, cluster: Cluster) -> dict[str, Any]:
    blocks = list(zip(*ranks, strict=True))
    cores = min(len(os.sched_getaffinity(0)), len(ranks))
    return {
        "strategy": strategy,
        "step_seconds": statistics.median(max(wall for wall, _ in block) for block in blocks),
        "cpu_seconds": statistics.median(sum(on_cpu for _, on_cpu in block) for block in blocks) / cores,
        "predicted_seconds": predicted(strategy, cluster=cluster),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", required=True, help="what `shardwise calibrate --ranks` wrote")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    cluster = cluster_of(options.cluster)
    shape = shape_of(MODEL)
    assert isinstance(shape, GPTShape)
    case = Case(strategy="ddp", shape=shape, batch=BATCH, seq=SEQ, num_ranks=cluster.num_ranks)
    ranks = on_ranks(timed, case, tuple(STRATEGIES))
    rows = [row_of(strategy, [rank[strategy] for rank in ranks], cluster=cluster) for strategy in STRATEGIES]
    for row in rows:
        wall, on_cpu, guess = (1e3 * row[key] for key in ("step_seconds", "cpu_seconds", "predicted_seconds"))
        print(f"{row['strategy']:14} measured {wall:7.1f} ms, on the CPU {on_cpu:7.1f} ms   predicted {guess:7.1f} ms")
    wrong = [
        f"{one['strategy']} and {other['strategy']}"
        for one, other in combinations(rows, 2)
        if abs(one["cpu_seconds"] / other["cpu_seconds"] - 1) > APART
        and (one["cpu_seconds"] < other["cpu_seconds"]) != (one["predicted_seconds"] < other["predicted_seconds"])
    ]
    print("in the wrong order:", ", ".join(wrong) or "none")
    if options.out is not None:
        result = {**circumstances(), "cluster": str(cluster), "model": MODEL, "batch": BATCH, "seq": SEQ, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
