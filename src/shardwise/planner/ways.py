"""The traces that a plan needs, by the way in which each of its units runs.

Plans in fp8 are refused here, before they are costed, for devices and models that cannot have it.
"""

from functools import lru_cache

from shardwise.base.errors import InvalidPlan
from shardwise.hardware import Device
from shardwise.plan import Plan
from shardwise.program.buffers import DtypeSettings, dtype_settings, is_fp8, num_fp8, plan_with, why_no_layer
from shardwise.program.spec import ModelSpec, UnitSpec
from shardwise.program.spec.step import COMPILED, GATHERED, ROWWISE, TENSORWISE


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
    in_memory = (memory_way(plan, unit=unit.name) for unit in spec.units if not fp8_way(unit, plan=plan))
    return sorted({"none", *map(plan.recompute_of, names), *in_memory})


def fp8_way(unit: UnitSpec, *, plan: Plan) -> str:
    """Return how a unit with layers that multiply in fp8 computes (StepTrace.computes_in); "" if it has none."""
    if not plan.has_fp8:
        return ""
    return _fp8_way(unit, dtype_settings(plan), plan.placement(unit.name).params.is_sharded)


@lru_cache(maxsize=4096)
def _fp8_way(unit: UnitSpec, settings: DtypeSettings, is_sharded: bool) -> str:
    plan = plan_with(settings)
    if not any(is_fp8(param, unit=unit.name, plan=plan) for param in unit.params):
        return ""
    if plan.fp8_recipe == "rowwise":
        return ROWWISE
    return GATHERED if is_sharded and num_fp8(unit, plan=plan) else TENSORWISE


def fp8_traces(spec: ModelSpec, *, plan: Plan) -> list[tuple[str, str]]:
    """Return (computes in, recompute) of the traces with the allocations of units that multiply in fp8."""
    ways = ((fp8_way(unit, plan=plan), memory_way(plan, unit=unit.name)) for unit in spec.units)
    return sorted({way for way in ways if way[0]})


def check_planned_fp8(spec: ModelSpec, *, plan: Plan, device: Device) -> None:
    """Raise InvalidPlan for fp8 on a kind of device without it, or for a model without a layer that it is for."""
    if not plan.has_fp8:
        return
    if device.torch_type == "cuda" and device.fp8_flops_per_s is None:
        raise InvalidPlan(
            f"precision = 'fp8' on {device.name}: it has no fp8 products, as far as the hardware table knows (Ada, "
            "Hopper, Blackwell and CDNA 3 have); use precision bf16"
        )
    why = why_no_layer(spec, plan=plan)
    if why:
        raise InvalidPlan(why)
