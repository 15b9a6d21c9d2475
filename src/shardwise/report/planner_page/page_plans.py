"""The plans that the page offers."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import SHARDED, STRATEGIES
from shardwise.planner.job import Job
from shardwise.planner.memory.peak import job_of
from shardwise.spec import ModelSpec

WAYS = ("none", "selective", "full")
"""The choices for recomputing activations."""

HOSTS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "none": {},
        "states": {"offload_states": True},
        "backward": {"offload_states": True, "update": "backward"},
        "all": {"offload_states": True, "offload_activations": True},
    }
)
"""The choices for what lives in host memory, and their settings of a plan."""

PER_NODE = 8
DEVICE_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128, 256, 512, 1024)
"""The numbers of devices that the page offers: one node of up to 8, or several nodes of 8. Host memory is offered on
one node: over more, a slice of the states is small."""

PAGE_PLAN = Plan(precision="bf16")
"""The settings that the page does not change. The optimizer is AdamW."""


def strategies_with(host: str) -> list[str]:
    """Return the strategies that may be combined with a choice for host memory: their gradients are sharded."""
    return [name for name, placement in STRATEGIES.items() if host == "none" or placement.grads is SHARDED]


def page_job(spec: ModelSpec, mesh: Mesh, **settings: Any) -> Job:
    """Return the job of the page's plan with these settings."""
    plan = replace(PAGE_PLAN, mesh=mesh, **settings)
    return job_of(spec, plan=plan, num_ranks=mesh.num_ranks, optimizer="adamw", device="cuda")
