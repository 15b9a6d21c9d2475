"""What the planner says of a plan on a cluster, for the claims."""

from dataclasses import replace
from functools import cache

from shardwise.hardware import cluster_of
from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.planner.memory.peak import job_of
from shardwise.planner.search.candidates import Candidate, candidates, cost, largest_batch
from shardwise.planner.search.recommend import recommend
from shardwise.program.spec import ModelSpec

OPTIMIZER = "adamw"


@cache
def source_of(model: str) -> Model:
    return Model(model)


def planned(
    model: str, *, strategy: str, cluster: str, micro_batch: int | None = None, precision: str = "bf16", **settings: str
) -> Candidate:
    """A strategy on a cluster, at a micro-batch or (None) at the largest that fits."""
    where = cluster_of(cluster)
    plan = Plan(strategy=strategy, precision=precision, micro_batch=micro_batch, **settings)
    spec = source_of(model).spec_for(plan)
    if micro_batch is None:
        most = largest_batch(spec, plan=plan, cluster=where, optimizer=OPTIMIZER, quick=True)
        plan = replace(plan, micro_batch=most)
    return cost(spec, plan=plan, cluster=where, optimizer=OPTIMIZER, quick=True)


def recommended(model: str, *, cluster: str) -> str:
    """The strategy that `shardwise plan` takes: the fastest that fits, or a simpler one within 5% of it; or "none"."""
    source, where = source_of(model), cluster_of(cluster)
    found = candidates(
        source.spec_for,
        plan=Plan(precision="bf16"),
        strategies=("ddp", "zero1", "zero2", "shard_grad_op", "fsdp"),
        cluster=where,
        optimizer=OPTIMIZER,
        goal="throughput",
        quick=True,
    )
    best = recommend(found, goal="throughput", spec_for=source.spec_for, optimizer=OPTIMIZER).best
    return best.plan.strategy if best is not None else "none"


def samples_per_s(candidate: Candidate) -> float:
    assert candidate.time is not None
    return candidate.time.samples_per_s


def state_bytes(spec: ModelSpec, *, plan: Plan, num_ranks: int, optimizer: str = OPTIMIZER) -> dict[str, int]:
    """Parameters, gradients and optimizer state of one rank when the optimizer runs."""
    job = job_of(spec, plan=plan, num_ranks=num_ranks, optimizer=optimizer, device="cuda")
    totals = dict.fromkeys(("params", "grads", "optim"), 0)
    for name, states in job.states.items():
        weight = job.short.weights.get(name, 1)
        for category in totals:
            totals[category] += weight * getattr(states, category)
    return totals
