"""What was decided for a prepared model, in one line."""

from math import prod

import torch.distributed as dist
from torch import nn

from shardwise.engine.carry import require_engine
from shardwise.engine.owned_model import OwnedModel
from shardwise.plan import Plan


def summary(model: nn.Module) -> str:
    """Return one line on what `prepare` decided for a prepared model, and how much of it this rank owns.

    It reads like this: fsdp on 2 ranks, fp32, engine shardwise; rank 0 owns 544 of 1,088 parameters
    """
    engine = require_engine(model)
    plan: Plan = engine.plan
    held: OwnedModel = engine.held()
    num_ranks = dist.get_world_size()
    num_owned = sum(one.stop - one.start for one in held.slices)
    num_all = sum(prod(shape) for shape, _ in held.parameters.values())
    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}" + (f" as {plan.mesh}" if plan.mesh else "")
    return (
        f"{plan.strategy} on {ranks}, {plan.precision}, engine {plan.engine}; "
        f"rank {dist.get_rank()} owns {num_owned:,} of {num_all:,} parameters"
    )
