"""When the optimizer steps a unit. Engine and planner follow it."""

from shardwise.plan import Plan
from shardwise.plan.placement import Placement
from shardwise.program.rules.host import has_states_on_host


def is_in_backward(plan: Plan, placement: Placement) -> bool:
    """Return whether a unit is stepped inside backward, as soon as its gradients are averaged."""
    return plan.updates_in_backward and placement.grads.is_sharded


def takes_grads(unit: str, *, plan: Plan, placement: Placement) -> bool:
    """Return whether averaged gradients leave the device, or are used and freed, before backward ends."""
    by_cpu = plan.offload_update == "host" and has_states_on_host(unit, plan=plan, placement=placement)
    return by_cpu or is_in_backward(plan, placement)
