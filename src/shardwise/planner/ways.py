"""Which traces a plan needs: how each of its units runs."""

from shardwise.plan import Plan
from shardwise.spec import ModelSpec
from shardwise.spec.step import COMPILED


def is_compiled(plan: Plan, *, unit: str) -> bool:
    """Whether inductor makes kernels of what a unit computes; aot_eager runs what it has captured as it is."""
    return plan.compiler == "inductor" and plan.compiles(unit)


def memory_way(plan: Plan, *, unit: str) -> str:
    """The trace, by its `recompute`, that says what a unit allocates."""
    recompute = plan.recompute_of(unit)
    return COMPILED[recompute] if is_compiled(plan, unit=unit) else recompute


def traced_ways(spec: ModelSpec, *, plan: Plan) -> list[str]:
    """The traces, by their `recompute`, that a plan of the model needs: those of its units, and the root's.

    What a compiled unit computes is in the trace of the unit uncompiled.
    """
    names = [unit.name for unit in spec.units]
    return sorted({"none", *map(plan.recompute_of, names), *(memory_way(plan, unit=name) for name in names)})
