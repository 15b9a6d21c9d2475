"""A plan that ran out of memory → the next one with less, of those that a prepared model can be given (replan.py).

The model is not traced, so that its activations are not known: what a plan needs for parameters, gradients and states
is predicted, and recomputation is known to keep less.
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
# What a plan must at least be undercut by, or it is not worth the move.
_LESS = 0.9


def smaller_plan(model: nn.Module) -> Plan | None:
    """The first of `changes` that this model can be given and that needs less; None if there is none.

    The same on every rank, which need not ask each other.
    """
    engine = engine_of(model)
    now = states_bytes(engine, engine.plan)
    for plan in replannable(engine.plan):
        if _is_possible(engine, plan) and _needs_less(engine, plan, now=now):
            return plan
    return None


def replannable(plan: Plan) -> Iterator[Plan]:
    """The changes of a plan that keep each pass as it is, those first that cost little."""
    # Here, so that a job that does not fail does not import it.
    from shardwise.planner.search.nearest import changes

    asked = replace(plan, micro_batch=plan.micro_batch or 1)
    for changed in changes(asked):
        if changed.precision == plan.precision and keeps_passes(changed, of=asked):
            yield replace(changed, micro_batch=plan.micro_batch)


def keeps_passes(changed: Plan, *, of: Plan) -> bool:
    """Whether a step has as many passes, of as many samples, whose gradients are summed up in the same order."""
    passes, before = ((plan.micro_batch, plan.accumulate, plan.accumulate_reduced) for plan in (changed, of))
    return passes == before


def _is_possible(engine: Engine, plan: Plan) -> bool:
    try:
        describe_replan(engine, plan=plan, mesh=plan.mesh or Mesh(shard=dist.get_world_size()))
    except ShardwiseError:
        return False
    return True


def _needs_less(engine: Engine, plan: Plan, *, now: int | None) -> bool:
    """Of states, or of activations with states that are about as large."""
    states = states_bytes(engine, plan)
    if now is None or states is None or states <= _LESS * now:
        return True
    before = engine.plan
    keeps_less = plan.offload_activations and not before.offload_activations
    keeps_less |= _RECOMPUTES.index(plan.recompute) > _RECOMPUTES.index(before.recompute)
    return keeps_less and states <= now / _LESS
