"""The traces that a plan needs, by the way in which each of its units runs."""

from shardwise.plan import Plan
from shardwise.spec import ModelSpec
from shardwise.spec.step import COMPILED


def is_compiled(plan: Plan, *, unit: str) -> bool:
    """Return whether inductor generates kernels for a unit; aot_eager runs the captured operations unchanged."""
    return plan.compiler == "inductor" and plan.compiles(unit)


def memory_way(plan: Plan, *, unit: str) -> str:
    """Return the `recompute` of the trace with a unit's allocations.

    What a unit keeps that recomputes selectively is the same if it is compiled: the outputs of products and attention.
    """
    recompute = plan.recompute_of(unit)
    return COMPILED.get(recompute, recompute) if is_compiled(plan, unit=unit) else recompute


def traced_ways(spec: ModelSpec, *, plan: Plan) -> list[str]:
    """Return the `recompute` of all traces that a plan needs, for its units and the root.

    The operations of a compiled unit are in its uncompiled trace.
    """
    names = [unit.name for unit in spec.units]
    return sorted({"none", *map(plan.recompute_of, names), *(memory_way(plan, unit=name) for name in names)})
