"""Specs for the planner's tests: models that need no torch."""

from shardwise.models.sources import Source
from shardwise.plan import Plan
from shardwise.spec import ModelSpec


def spec_for(model: str, *plans: Plan, seq: int | None = None) -> ModelSpec:
    """A shipped spec with the traces that all of `plans` need."""
    source = Source(model, seq=seq)
    spec = source.spec_for(Plan(precision="bf16"))
    for plan in plans:
        spec = source.spec_for(plan)
    return spec
