"""Whether the solver compiles units, where `compile = "auto"` leaves that to it. No torch.

Compiled units are predicted to be at least as fast and to need no more memory, so they are tried first; they are taken
if they make a step clearly faster, because compiling takes time too.
"""

from dataclasses import replace

from shardwise.hardware import Cluster
from shardwise.plan import Plan
from shardwise.plan.placement import AUTO
from shardwise.planner.search.candidates import Candidate
from shardwise.planner.time.step_time import estimate_time
from shardwise.spec import ModelSpec

# How much faster compiled units must make a step.
_WORTH_COMPILING = 1.02


def tried_first(plan: Plan, *, cluster: Cluster) -> str:
    """The backend to solve with first: that of the plan, or what is tried where it leaves that open."""
    if plan.compile != AUTO:
        return plan.compile
    # The time of compiled code on a CPU is not modelled.
    return "none" if cluster.device.name == "cpu" else "inductor"


def compiling_pays(candidate: Candidate, *, spec: ModelSpec, optimizer: str) -> bool:
    """Whether the plan is clearly faster than the same without compiled units."""
    plain = replace(candidate.plan, compile="none")
    time = estimate_time(spec, plan=plain, cluster=candidate.cluster, optimizer=optimizer)
    if time is None or candidate.time is None:
        return False
    return time.step_seconds >= _WORTH_COMPILING * candidate.time.step_seconds
