"""`strategy = "auto"` in a job: find its devices, and one plan for all ranks.

Rank 0 traces the model on fake tensors and solves; the others wait for its plan, or for its error.
"""

import os
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from shardwise.base.errors import InvalidPlan
from shardwise.base.vocabulary.segments import segments_expand
from shardwise.comm.groups.agreement import on_each_rank
from shardwise.hardware import Cluster, cluster_of
from shardwise.hardware.cluster import make_cluster
from shardwise.hardware.measuring.device_file import device_like
from shardwise.hardware.sourced import Sourced
from shardwise.models.reference import Model
from shardwise.models.tasks import Task
from shardwise.plan import Plan
from shardwise.planner.search.auto import solve_plan
from shardwise.planner.search.nearest import find_smaller
from shardwise.planner.search.request import AutoRequest, NoPlanFits


def auto_plan(
    model: Task | str,
    *,
    plan: Plan | None = None,
    cluster: Cluster | str | None = None,
    budget_bytes: int | None = None,
    global_batch: int | None = None,
    goal: str = "throughput",
    optimizer: str = "adamw",
) -> Plan:
    """Return the plan of `Plan.auto`. With a process group it is collective: every rank gets the plan of rank 0."""
    where = cluster_of(cluster) if isinstance(cluster, str) else cluster or job_cluster()
    request = AutoRequest(
        plan=plan or Plan(precision="bf16"),
        cluster=where,
        optimizer=optimizer,
        budget_bytes=budget_bytes,
        global_batch=global_batch,
        goal=goal,
    )

    def solve() -> Plan:
        named = _named(model, cluster=where, asked_by="Plan.auto")
        return solve_plan(named.spec_for, request=request).candidate.plan

    return solved_by_rank_0(solve)


def smaller_plan(
    model: Task | str, plan: Plan, *, cluster: Cluster | str | None = None, optimizer: str = "adamw"
) -> Plan:
    """Return a plan that needs less memory than `plan`, which ran out of it: for the next start of a loop of your own.

        plan = shardwise.smaller_plan(shardwise.Task(model=model, loss=loss, make_batch=make_batch), plan)

    It is the nearest change of the plan that is predicted to fit, or to need a tenth less where the plan should have
    fitted. A step keeps its samples and its precision. With a process group it is collective: every rank gets the plan
    of rank 0. NoPlanFits, if there is none.
    """
    where = cluster_of(cluster) if isinstance(cluster, str) else cluster or job_cluster()
    if plan.is_auto or plan.micro_batch is None:
        raise InvalidPlan("smaller_plan needs the plan that ran out of memory, with its strategy and its micro_batch")

    def solve() -> Plan:
        named = _named(model, cluster=where, asked_by="smaller_plan")
        request = AutoRequest(plan=plan, cluster=where, optimizer=optimizer)
        found = find_smaller(named.spec_for, plan=plan, request=request)[1]
        if found is None:
            raise NoPlanFits("no plan with the same samples per step needs less memory on these devices")
        return found.plan

    return solved_by_rank_0(solve)


def _named(model: Task | str, *, cluster: Cluster, asked_by: str) -> Model:
    if not isinstance(model, Task | str):
        raise InvalidPlan(
            f"{asked_by} needs a loss and a batch to trace this {type(model).__name__}: give it "
            "shardwise.Task(model=model, loss=loss, make_batch=make_batch), or the name of a model"
        )
    return Model(model, kernels=cluster.device.torch_type)


def solved_by_rank_0(solve: Callable[[], Plan]) -> Plan:
    """Return the plan of rank 0 on every rank, or raise its error on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return solve()
    found = on_each_rank(lambda: solve().to_dict() if dist.get_rank() == 0 else {})
    return Plan.from_dict(found[0])


def job_cluster(device: torch.device | None = None, *, num_ranks: int | None = None) -> Cluster:
    """Return a cluster of this rank's device for the whole job, with the name and memory that the driver reports."""
    joined = dist.is_initialized()
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    count = num_ranks or (dist.get_world_size() if joined else 1)
    title, capacity = "cpu", None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        title = properties.name
        capacity = Sourced(value=properties.total_memory, kind="measured", source="torch, on this device")
    found = device_like(title, kind=device.type)
    per_node = _per_node(count)
    nodes = count // per_node
    found = replace(found, capacity_bytes=capacity or found.capacity_bytes)
    cluster = make_cluster(found, num_nodes=nodes, devices_per_node=per_node, fabric=None)
    return replace(cluster, expands_segments=segments_expand(os.environ))


def _per_node(num_ranks: int) -> int:
    """Return the ranks of this machine, if all machines have the same number."""
    here = torch.cuda.device_count() or num_ranks
    return here if here < num_ranks and num_ranks % here == 0 else num_ranks
