"""What a plan or a model asks for that torch's engines do not have: one line each, with the way out."""

from collections.abc import Mapping

from shardwise.errors import InvalidModel, InvalidPlan
from shardwise.placement import SHARDED, Placement, strategy_of
from shardwise.plan import Plan
from shardwise.spec import ROOT, ModelSpec, TensorSpec


def check_plan(plan: Plan, *, placements: Mapping[str, Placement]) -> None:
    """Refuse a plan that torch cannot run. `Plan` itself refuses capture and ring for engine = 'torch'."""
    if plan.engine != "torch":
        raise InvalidPlan(f"engine = {plan.engine!r}: torch's own DDP and fully_shard run engine = 'torch'")
    if plan.recompute != "none":
        raise InvalidPlan(
            f"engine = 'torch' has no recompute = {plan.recompute!r}: set recompute = 'none' and call "
            "torch.utils.checkpoint.checkpoint(…, use_reentrant=False) in the model"
        )
    for unit, placement in placements.items():
        if placement.optim is SHARDED and placement.params is not SHARDED:
            raise InvalidPlan(
                f"engine = 'torch' has no {strategy_of(placement)} ({unit}): use ddp, shard_grad_op or fsdp, or set "
                "engine = 'shardwise'"
            )
    replicated = [unit for unit, placement in placements.items() if placement.params is not SHARDED]
    sharded = [unit for unit, placement in placements.items() if placement.params is SHARDED]
    if replicated and sharded:
        raise InvalidPlan(
            f"engine = 'torch' has no mix of replicated and sharded units ({replicated[0]} is "
            f"{strategy_of(placements[replicated[0]])}, {sharded[0]} is {strategy_of(placements[sharded[0]])}): "
            "give all units ddp or none, or set engine = 'shardwise'"
        )
    if plan.reduce_dtype != "fp32" and (replicated or plan.precision == "native"):
        where = "under ddp" if replicated else "under precision = 'native'"
        raise InvalidPlan(
            f"engine = 'torch' reduces gradients in their own dtype {where}, not in {plan.reduce_dtype}: leave "
            "reduce_dtype out, or set engine = 'shardwise'"
        )


def check_replicated(spec: ModelSpec) -> None:
    """Refuse a model that DistributedDataParallel would not take."""
    if not any(param.trainable for unit in spec.units for param in unit.params):
        raise InvalidModel(f"{spec.name} has no trainable parameter, so DistributedDataParallel has nothing to do")


def check_sharded(spec: ModelSpec, *, plan: Plan) -> None:
    """Refuse a model that fully_shard would not take, or would take and train wrongly."""
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
                f"unit {unit.name} holds parameters of {' and '.join(dtypes)}, and fully_shard wants one dtype a "
                "unit: cut it by dtype (units = 'auto + MODULE'), or set engine = 'shardwise'"
            )


def _check_tie(param: TensorSpec, *, owner: str, spec: ModelSpec) -> None:
    """fully_shard keeps a tie only where one unit holds all ends; elsewhere each end would go its own way."""
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
