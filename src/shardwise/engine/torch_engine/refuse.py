"""Checks that refuse a plan or a model that torch's engines cannot run, in one line with the way out.

The limits that depend on a plan alone are in plan/limits.py.
"""

from collections.abc import Mapping

from shardwise.base.errors import InvalidModel, InvalidPlan
from shardwise.plan import Plan
from shardwise.plan.limits import LIMITS
from shardwise.plan.placement import Placement
from shardwise.program.spec import ROOT, ModelSpec, TensorSpec


def check_plan(plan: Plan, *, placements: Mapping[str, Placement]) -> None:
    """Raise InvalidPlan for a plan that torch's engines cannot run."""
    if plan.engine != "torch":
        raise InvalidPlan(f"engine = {plan.engine!r}: torch's own DDP and fully_shard run engine = 'torch'")
    refusal = LIMITS[plan.engine].why_not(plan, placements=placements)
    if refusal is not None:
        raise InvalidPlan(refusal.sentence)


def check_replicated(spec: ModelSpec) -> None:
    """Raise InvalidModel for a model that DistributedDataParallel does not accept."""
    if not any(param.trainable for unit in spec.units for param in unit.params):
        raise InvalidModel(f"{spec.name} has no trainable parameter, so DistributedDataParallel has nothing to do")


def check_sharded(spec: ModelSpec, *, plan: Plan) -> None:
    """Raise InvalidModel for a model that fully_shard does not accept, or would train wrongly."""
    for unit in spec.units:
        for param in unit.params:
            if not param.shape:
                raise InvalidModel(
                    f"{param.name} has no dimension that fully_shard could cut: give it the shape (1,), or set "
                    "engine = 'shardwise'"
                )
            _check_tie(param, owner=unit.name, spec=spec)
        dtypes = sorted({param.dtype for param in unit.params})
        if plan.precision == "native" and len(dtypes) > 1:
            raise InvalidModel(
                f"unit {unit.name} holds parameters of {' and '.join(dtypes)}, and fully_shard wants one dtype per "
                "unit: cut it by dtype (units = 'auto + MODULE'), or set engine = 'shardwise'"
            )


def _check_tie(param: TensorSpec, *, owner: str, spec: ModelSpec) -> None:
    """Check that one unit holds all uses of a tied parameter: otherwise fully_shard unties it."""
    holders = {name: _innermost_unit(name, spec=spec) for name in (param.name, *param.aliases)}
    astray = [name for name, unit in holders.items() if unit != owner]
    if astray:
        raise InvalidModel(
            f"{param.name} and {', '.join(param.aliases)} are one parameter, but {astray[0]} lies in unit "
            f"{holders[astray[0]]}: fully_shard would untie them; make {holders[astray[0]]} no unit, or set "
            "engine = 'shardwise'"
        )


def _innermost_unit(name: str, *, spec: ModelSpec) -> str:
    above = [unit.name for unit in spec.units if unit.name != ROOT and name.startswith(unit.name + ".")]
    return max(above, key=len, default=ROOT)
