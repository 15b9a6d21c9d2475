"""The rules of a step: trigger → operations. One set for each engine; `rules_of` returns that of a plan."""

from shardwise.plan import Plan
from shardwise.program.rules.context import Rules
from shardwise.program.rules.ddp import DDP
from shardwise.program.rules.fully_shard import FULLY_SHARD
from shardwise.program.rules.ours import OURS
from shardwise.spec import ROOT


def rules_of(plan: Plan) -> Rules:
    """Return the rules of the engine that runs a plan. torch has two engines; the root's placement chooses one."""
    if plan.engine == "shardwise":
        return OURS
    return FULLY_SHARD if plan.placement(ROOT).params.is_sharded else DDP
