"""Refuses plans that this job cannot run, before the model is changed."""

import torch
import torch.distributed as dist

from shardwise.base.errors import InvalidPlan
from shardwise.engine.activations.compiled_units import check_compile
from shardwise.engine.fp8.layer_classes import check_fp8
from shardwise.plan import Plan
from shardwise.plan.placement import Mesh, Placement
from shardwise.program.spec import ModelSpec


def check_plan(plan: Plan, *, spec: ModelSpec, mesh: Mesh, device: torch.device) -> dict[str, Placement]:
    """Return the placement of each unit; refuse a plan that this job cannot run."""
    mesh.check_ranks(dist.get_world_size())
    if plan.engine != "shardwise":
        raise InvalidPlan(f"engine = {plan.engine!r}: shardwise.prepare runs engine = 'shardwise'")
    placements = plan.placements(unit.name for unit in spec.units)
    check_compile(placements, plan=plan)
    check_fp8(plan, spec=spec, device=device)
    chosen = [placement for name, placement in placements.items() if plan.has_states_on_host(name)]
    if chosen and not any(placement.grads.is_sharded for placement in chosen):
        raise InvalidPlan(
            f"offload_states with strategy = {plan.strategy!r}: what every rank holds whole stays on the "
            "device; use zero2, shard_grad_op or fsdp"
        )
    return placements
