"""Specs for the planner's tests: models that need no torch."""

from shardwise.models.reference import Model
from shardwise.plan import Plan
from shardwise.program.spec import ModelSpec


def spec_for(model: str, *plans: Plan, seq: int | None = None) -> ModelSpec:
    """A shipped spec with the traces that all of `plans` need."""
    return Model(model, seq=seq).spec_for(Plan(precision="bf16"), *plans)
