"""Finds a plan that needs less memory than the one that ran out, among those that `replan` allows.

The model is not traced, so its activations are not known: the memory for parameters, gradients and states is predicted,
and recomputation is known to keep fewer activations.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch.distributed as dist
from torch import nn

from shardwise.engine.engine import Engine, engine_of
from shardwise.engine.out_of_memory.out_of_memory import states_bytes
from shardwise.engine.plan_change.replan import describe_replan
from shardwise.errors import ShardwiseError
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh

_RECOMPUTES = ("none", "selective", "full")
# A new plan must need at most this share of the old one's memory to be worth the move.
_LESS = 0.9


def smaller_plan(model: nn.Module) -> Plan | None:
    """Return the first change of the plan that is possible and needs less memory; None if there is none.

    All ranks find the same one without communication.
    """
    # Imported only by a job that fails.
    from shardwise.planner.search.nearest import fewest_on_host, host_units

    engine = engine_of(model)
    now = states_bytes(engine, engine.plan)

    def fits(plan: Plan) -> bool:
        return _is_possible(engine, plan) and _needs_less(engine, plan, now=now)

    for plan in replannable(engine.plan):
        if fits(plan):
            # How much activations of some units need is not known.
            if plan.offload_activations != engine.plan.offload_activations:
                return plan
            return fewest_on_host(plan, before=engine.plan, names=host_units(engine.core.spec), fits=fits)
    return None


def replannable(plan: Plan) -> Iterator[Plan]:
    """Yield the changes of a plan that leave each pass unchanged, the cheapest first."""
    # Imported only by a job that fails.
    from shardwise.planner.search.nearest import changes

    asked = replace(plan, micro_batch=plan.micro_batch or 1)
    for changed in changes(asked):
        if changed.precision == plan.precision and keeps_passes(changed, of=asked):
            yield replace(changed, micro_batch=plan.micro_batch)


def keeps_passes(changed: Plan, *, of: Plan) -> bool:
    """Return whether a step has equally many passes of equally many samples, summed in the same order."""
    passes, before = ((plan.micro_batch, plan.accumulate, plan.accumulate_reduced) for plan in (changed, of))
    return passes == before


def _is_possible(engine: Engine, plan: Plan) -> bool:
    try:
        describe_replan(engine, plan=plan, mesh=plan.mesh or Mesh(shard=dist.get_world_size()))
    except ShardwiseError:
        return False
    return True


def _needs_less(engine: Engine, plan: Plan, *, now: int | None) -> bool:
    """Return whether a plan needs less memory for states, or for activations with states of about the same size."""
    states = states_bytes(engine, plan)
    if now is None or states is None or states <= _LESS * now:
        return True
    before = engine.plan
    keeps_less = plan.offload_activations is True and before.offload_activations is not True
    keeps_less |= _RECOMPUTES.index(plan.recompute) > _RECOMPUTES.index(before.recompute)
    return keeps_less and states <= now / _LESS
