"""How fast the planner is: plans a second of a CPU, and CPU seconds of `shardwise plan` in a fresh process.

python benchmarks/planner_speed.py
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from shardwise.hardware import cluster_of
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES, Mesh
from shardwise.planner import estimate
from shardwise.planner.time.step_time import estimate_time

MODELS = ("gpt2-124m", "llama-3.1-8b", "llama-3.1-405b")
CLUSTER = "8x8xh100-80gb"
# On which all of them fit.
LARGE_CLUSTER = "64x8xb200"
NUM_RANKS = 64
SOLVED = (("llama-3.1-8b", CLUSTER), ("llama-3.1-405b", LARGE_CLUSTER))
SOLVE = """
from shardwise.hardware import cluster_of
from shardwise.plan import Plan
from shardwise.planner.search.auto import solve_plan
from shardwise.planner.search.request import AutoRequest
from shardwise.models.reference import Model
request = AutoRequest(plan=Plan(precision="bf16"), cluster=cluster_of({cluster!r}))
solve_plan(Model({model!r}).spec_for, request=request)
"""
OWN_MODEL = """
import torch
from torch import nn
from shardwise.models.tasks import Task

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

def task():
    model = nn.Sequential(*(Block() for _ in range(12)))
    return Task(model=model, loss=lambda m, b: m(b).square().mean(), make_batch=lambda size: torch.ones(size, 256))
"""


def plans() -> list[Plan]:
    """Every strategy, precision, recomputation and mesh, with several batches each."""
    meshes = [Mesh(replicate=NUM_RANKS // shard, shard=shard) for shard in (8, 16, 64)]
    batches = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    return [
        Plan(strategy=strategy, precision=precision, recompute=recompute, mesh=mesh, micro_batch=batch)
        for strategy, precision, recompute, mesh, batch in product(
            STRATEGIES, ("bf16", "fp32"), ("none", "full"), meshes, batches
        )
    ]


def plans_per_second(model: str) -> tuple[float, float, float]:
    """Memory of a plan without the allocator's model; its time, when its memory is known; memory with that model."""
    source, cluster = Model(model), cluster_of(CLUSTER)
    candidates = plans()
    for plan in candidates:
        spec = source.spec_for(plan)
    # On a CPU, not by the wall: other processes disturb that less.
    started = time.process_time()
    for plan in candidates:
        estimate(spec, plan=plan, num_ranks=NUM_RANKS, batch=plan.micro_batch or 1, optimizer="adamw", quick=True)
    memory = len(candidates) / (time.process_time() - started)
    started = time.process_time()
    for plan in candidates:
        estimate_time(spec, plan=plan, cluster=cluster, optimizer="adamw")
    seconds = len(candidates) / (time.process_time() - started)
    some = candidates[::48]
    started = time.process_time()
    for plan in some:
        estimate(spec, plan=replace(plan, micro_batch=None), num_ranks=NUM_RANKS, batch=5)
    return memory, seconds, len(some) / (time.process_time() - started)


def command_seconds(*arguments: str) -> float:
    """CPU seconds of `shardwise plan`."""
    return process_seconds("-m", "shardwise", "plan", *arguments)


def solver_seconds(model: str, cluster: str) -> float:
    """CPU seconds of the solver with all that it needs: Python, imports, and the trace that comes with the package."""
    return process_seconds("-c", SOLVE.format(model=model, cluster=cluster))


def process_seconds(*arguments: str) -> float:
    """CPU seconds of a fresh process, the median of five."""
    times = []
    for _ in range(5):
        started = os.times()
        subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
        ended = os.times()
        used = ended.children_user + ended.children_system - started.children_user - started.children_system
        times.append(used)
    return statistics.median(times)


def lines() -> Iterator[str]:
    for model in MODELS:
        memory, timed, whole = plans_per_second(model)
        yield f"{model:16} plans a second: memory {memory:,.0f}, time {timed:,.0f}; allocator's model {whole:,.0f}"
    for model in MODELS:
        options = ("--cluster", LARGE_CLUSTER, "--recompute", "full")
        yield f"shardwise plan {model:16} {' '.join(options)}: {command_seconds(model, *options):.2f} s of CPU"
    for model, cluster in SOLVED:
        yield f"auto for {model} on {cluster}: {solver_seconds(model, cluster):.2f} s of CPU, in a fresh process"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "own.py")
        path.write_text(OWN_MODEL)
        seconds = command_seconds(f"python:{path}:task", "--cluster", "8xh100-80gb")
        yield f"shardwise plan of your own 12 layers, traced: {seconds:.2f} s of CPU"


def main() -> None:
    for line in lines():
        print(line, flush=True)


if __name__ == "__main__":
    main()
