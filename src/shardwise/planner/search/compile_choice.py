"""The solver's choice whether to compile units, for `compile = "auto"`. No torch.

Compiled units are predicted to be at least as fast and to need no more memory, so they are tried first. They are chosen
only if they make a step clearly faster, because compilation takes time too.
"""

from dataclasses import replace

from shardwise.hardware import Cluster
from shardwise.plan import Plan
from shardwise.plan.placement import AUTO
from shardwise.planner.search.candidates import Candidate
from shardwise.planner.time.step_time import estimate_time
from shardwise.program.spec import ModelSpec

# How much faster compiled units must make a step.
_WORTH_COMPILING = 1.02


def tried_first(plan: Plan, *, cluster: Cluster) -> str:
    """Return the plan's backend or, for auto, the one to try first."""
    if plan.compile != AUTO:
        return plan.compile
    # The time of compiled code on a CPU is not modelled.
    return "none" if cluster.device.name == "cpu" else "inductor"


def compiling_pays(candidate: Candidate, *, spec: ModelSpec, optimizer: str) -> bool:
    """Return whether the plan is clearly faster than the same without compiled units."""
    plain = replace(candidate.plan, compile="none")
    time = estimate_time(spec, plan=plain, cluster=candidate.cluster, optimizer=optimizer)
    if time is None or candidate.time is None:
        return False
    return time.step_seconds >= _WORTH_COMPILING * candidate.time.step_seconds
