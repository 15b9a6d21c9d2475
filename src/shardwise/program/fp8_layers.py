"""Which linear layers multiply in fp8 under a plan, and why others do not. No torch here.

The engine, the planner and `shardwise doctor` ask the same function.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.plan import Plan
from shardwise.spec import ROOT, ModelSpec, TensorSpec
from shardwise.vocabulary.dtypes import is_floating_point

MULTIPLE = 16
"""Both sizes of an fp8 operand are multiples of this many elements: the hardware loads 16 bytes at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayer:
    """A linear layer by the name of its weight; `why_not` is "" if it multiplies in fp8."""

    unit: str
    weight: TensorSpec
    why_not: str


def why_not_fp8(param: TensorSpec, *, unit: str, plan: Plan) -> str:
    """Return why a parameter is not multiplied in fp8, in a few words; "" if it is."""
    if param.aliases and len(param.shape) == 2:
        return f"shares its weight with {param.aliases[0]}"
    if not param.linear or not is_floating_point(param.dtype):
        return "is not the weight of an nn.Linear"
    if unit == ROOT:
        return "is in no unit but the root"
    if param.keep_fp32 or plan.keeps_fp32(param.name):
        return "is kept in fp32"
    if plan.keeps_bf16(param.name):
        return "is kept in bf16"
    rows, columns = param.shape
    if rows % MULTIPLE or columns % MULTIPLE:
        return f"is {columns} → {rows}, which must be multiples of {MULTIPLE}"
    if min(rows, columns) < plan.fp8_min_features:
        return f"is {columns} → {rows}, below fp8_min_features = {plan.fp8_min_features}"
    return ""


def is_fp8(param: TensorSpec, *, unit: str, plan: Plan) -> bool:
    """Return whether a parameter is multiplied in fp8."""
    return plan.has_fp8 and not why_not_fp8(param, unit=unit, plan=plan)


def fp8_weight_names(spec: ModelSpec, *, plan: Plan) -> frozenset[str]:
    """Return the names of the weights that a plan multiplies in fp8."""
    if not plan.has_fp8:
        return frozenset()
    return frozenset(layer.weight.name for layer in linear_layers(spec, plan=plan) if not layer.why_not)


def why_no_layer(spec: ModelSpec, *, plan: Plan) -> str:
    """Return the sentence that refuses fp8 for a model without a layer for it; "" if it has one."""
    # Layers of units first: their reasons say more.
    layers = sorted(linear_layers(spec, plan=plan), key=lambda layer: layer.unit == ROOT)
    if any(not layer.why_not for layer in layers):
        return ""
    why = f"{layers[0].weight.name} {layers[0].why_not}" if layers else "it has no nn.Linear"
    return f"precision = 'fp8', and no linear layer of the model can multiply in it: {why}; set precision = 'bf16'"


def linear_layers(spec: ModelSpec, *, plan: Plan) -> Iterator[LinearLayer]:
    """Yield every linear layer of a model, in the order of its units."""
    for unit in spec.units:
        for param in unit.params:
            if param.linear or (param.aliases and len(param.shape) == 2):
                yield LinearLayer(unit=unit.name, weight=param, why_not=why_not_fp8(param, unit=unit.name, plan=plan))
