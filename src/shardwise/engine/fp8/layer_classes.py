"""A model's linear layers → fp8 layers, and back; and the plans that have none."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.fp8.linear import Fp8Linear, GatheredLinear, RowwiseLinear, TensorwiseLinear, fp8_class
from shardwise.errors import InvalidPlan
from shardwise.plan import Plan
from shardwise.program.fp8_layers import linear_layers, why_no_layer
from shardwise.spec import ModelSpec

LEAST_CAPABILITY = (8, 9)
"""Ada; Hopper and Blackwell come after it."""

_LINEARS: dict[str, type[Fp8Linear]] = {"tensorwise": TensorwiseLinear, "rowwise": RowwiseLinear}


def check_fp8(plan: Plan, *, spec: ModelSpec, device: torch.device) -> None:
    """Refuse fp8 on a device without it, and for a model without a layer that it is for."""
    if not plan.has_fp8:
        return
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        raise InvalidPlan(
            f"precision = 'fp8' on {torch.cuda.get_device_name(device)}: fp8 products need compute capability "
            "8.9 or later (Ada, Hopper, Blackwell); set precision = 'bf16'"
        )
    why = why_no_layer(spec, plan=plan)
    if why:
        raise InvalidPlan(why)


def fp8_modules(model: nn.Module, *, spec: ModelSpec, plan: Plan) -> Iterator[tuple[str, nn.Linear]]:
    """Yield (name of the weight, module) of each layer that multiplies in fp8."""
    if not plan.has_fp8:
        return
    for layer in linear_layers(spec, plan=plan):
        if not layer.why_not:
            module = model.get_submodule(layer.weight.name.rpartition(".")[0])
            assert isinstance(module, nn.Linear)
            yield layer.weight.name, module


def multiply_in_fp8(
    model: nn.Module, *, spec: ModelSpec, plan: Plan, gathered: Mapping[str, tuple[Tensor, Tensor]]
) -> list[Callable[[], None]]:
    """Let the plan's layers multiply in fp8; return the functions that undo it.

    gathered   name of a weight that is gathered in fp8 → its values, and the inverse of their scale
    """
    undo: list[Callable[[], None]] = []
    for name, module in fp8_modules(model, spec=spec, plan=plan):
        own: Any = type(module)
        base: Any = GatheredLinear if name in gathered else _LINEARS[plan.fp8_recipe]
        module.__class__ = fp8_class(own, base=base)
        if name in gathered:
            vars(module)["fp8_weight"], vars(module)["fp8_inverse"] = gathered[name]
        undo.append(partial(_undo, module, own))
    return undo


def _undo(module: nn.Linear, own: type[nn.Linear]) -> None:
    module.__class__ = own
    for name in ("fp8_weight", "fp8_inverse"):
        vars(module).pop(name, None)
