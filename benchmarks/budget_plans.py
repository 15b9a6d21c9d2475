"""The plans that auto_budgets.py runs: models, memory budgets, and what is solved or costed within them. No GPU."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import hugging_face_models

from shardwise.hardware import Cluster, cluster_of
from shardwise.hardware.cluster import with_budget
from shardwise.hardware.device import Fabric, Link
from shardwise.hardware.sourced import Sourced
from shardwise.models.specs.traced import trace_task
from shardwise.models.tasks import Task, load_task
from shardwise.plan import Plan
from shardwise.plan.placement import STRATEGIES
from shardwise.planner.search.auto import solve_plan
from shardwise.planner.search.candidates import Candidate, candidates, cost
from shardwise.planner.search.request import RECOMPUTES, AutoRequest
from shardwise.program.spec import ModelSpec
from shardwise.program.spec.step import COMPILED

SHARES = (0.4, 0.6, 0.8)
# (model, ranks) → the batch at which the peak without recompute is taken. Rehearsals come before a job is joined.
BATCHES = {("llama-8b", 8): 4, ("llama-8b", 64): 4, ("llama-1b", 1): 8, ("vit-large", 1): 128, ("bert-large", 1): 64}
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
LLAMA_8B |= {"head_dim": 128, "tie_word_embeddings": False}
BASE = Plan(precision="bf16")
OPTIMIZER = "adamw-fused"


def task_of(name: str, *, device: str) -> Task:
    if name == "llama-8b":
        return hugging_face_models.task_of("llama-1b", device=device, **LLAMA_8B)
    if name in hugging_face_models.MODELS:
        return hugging_face_models.task_of(name, device=device)
    return load_task(name, device=device)


def cluster_for(num_ranks: int) -> Cluster:
    """Return H200s; several are linked by links that cost nothing."""
    cluster = cluster_of(f"{min(num_ranks, 8)}xh200")
    if num_ranks == 1:
        return cluster
    rate, latency = (Sourced(value=value, kind="datasheet", source="a rehearsal has no wire") for value in (1e18, 0.0))
    free = Link(name="free", bytes_per_s=rate, ring_bytes_per_s=rate, latency_seconds=latency)
    if num_ranks <= 8:
        return replace(cluster, link=free)
    fabric = Fabric(link=replace(free, between_nodes=True))
    return replace(cluster, link=free, num_nodes=num_ranks // 8, fabric=fabric)


def solve(name: str, *, num_ranks: int) -> Iterator[dict[str, Any]]:
    """Yield the plans of one model at each budget."""
    cluster = cluster_for(num_ranks)
    ways = [("bf16", way) for way in (*RECOMPUTES, *COMPILED.values())]
    spec = trace_task(task_of(name, device="meta"), name=name, ways=ways)
    largest = replace(BASE, strategy="ddp" if num_ranks == 1 else "fsdp", micro_batch=BATCHES[name, num_ranks])
    whole = cost(spec, plan=largest, cluster=cluster, optimizer=OPTIMIZER).memory.device_bytes
    draw = random.Random(0)
    for share in SHARES:
        budget = round(share * whole)
        request = AutoRequest(
            plan=replace(BASE, compile="auto"), cluster=cluster, optimizer=OPTIMIZER, budget_bytes=budget
        )
        within = with_budget(cluster, budget_bytes=budget)
        fixed = _fixed(spec, BASE, cluster=within)
        chosen = {
            "auto": [solve_plan(lambda *plans: spec, request=request).candidate],
            "best": fixed[:3],
            "random": draw.sample(fixed[3:], min(2, len(fixed[3:]))),
        }
        if name in hugging_face_models.MODELS and num_ranks == 1:
            checkpointed = replace(BASE, engine="torch", recompute="full", capture="off")
            chosen["accelerate"] = _fixed(
                spec, checkpointed, cluster=within, strategies=("fsdp",), recomputes=("full",)
            )
        what = {"model": name, "num_ranks": num_ranks, "share": share, "budget_bytes": budget}
        print(what, chosen["auto"][0].plan.to_dict(), flush=True)
        for kind, found in chosen.items():
            yield from ({**what, "kind": kind, **_predicted(one), "plan": one.plan.to_dict()} for one in found)


def _predicted(one: Candidate) -> dict[str, Any]:
    return {
        "predicted_samples_per_s": _speed(one),
        "predicted_allocated_bytes": one.memory.allocated_bytes,
        "predicted_device_bytes": one.memory.device_bytes,
        "predicted_outside_bytes": one.memory.device_bytes - one.memory.reserved_bytes,
    }


def _fixed(
    spec: ModelSpec,
    plan: Plan,
    *,
    cluster: Cluster,
    strategies: Sequence[str] = tuple(STRATEGIES),
    recomputes: Sequence[str] = RECOMPUTES,
) -> list[Candidate]:
    """Return plans of one strategy and one recompute that fit, the fastest first."""
    common = {"strategies": strategies, "cluster": cluster, "optimizer": OPTIMIZER, "goal": "throughput"}
    found = [
        one
        for recompute in recomputes
        for one in candidates(lambda *plans: spec, plan=replace(plan, recompute=recompute), **common)
        if one.fits == "yes"
    ]
    return sorted(found, key=lambda one: -_speed(one))


def _speed(candidate: Candidate) -> float:
    assert candidate.time is not None
    return candidate.time.samples_per_s
