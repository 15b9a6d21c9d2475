"""A model's linear layers → fp8 layers, and back; and the plans that have none."""

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.errors import InvalidPlan
from shardwise.engine.core.core import Core
from shardwise.engine.fp8.fp8_scales import Fp8Scales
from shardwise.engine.fp8.linear import Fp8Linear, GatheredLinear, RowwiseLinear, TensorwiseLinear, fp8_class
from shardwise.plan import Plan
from shardwise.program.buffers import linear_layers, why_no_layer
from shardwise.program.spec import ModelSpec

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


def multiply_in_fp8(core: Core) -> list["_Switched"]:
    """Let the layers of a core's plan multiply in fp8; return the handles that undo it."""
    model, plan = core.model, core.followed.plan
    if not plan.has_fp8:
        return []
    scales = core.executor.scales
    if not isinstance(scales, Fp8Scales):
        scales = Fp8Scales(core)
    gathered = {
        names[index]: (weight, scales.inverses[names[index]])
        for names, buffer in scales.buffers()
        for index, weight in buffer.weights.items()
    }
    switched = []
    for layer in linear_layers(core.followed.spec, plan=plan):
        name = layer.weight.name
        if not layer.why_not:
            module = model.get_submodule(name.rpartition(".")[0])
            assert isinstance(module, nn.Linear)
            base: Any = GatheredLinear if name in gathered else _LINEARS[plan.fp8_recipe]
            switched.append(_Switched(module, base, gathered.get(name)))
    return switched


class _Switched:
    """A layer that multiplies in fp8. Ends like a hook.

    gathered   the values of its weight, if they are gathered in fp8, and the inverse of their scale
    """

    def __init__(self, module: nn.Linear, base: Any, gathered: tuple[Tensor, Tensor] | None) -> None:
        self.id = -1
        own: Any = type(module)
        self._module, self._own = module, own
        module.__class__ = fp8_class(own, base=base)
        if gathered is not None:
            vars(module)["fp8_weight"], vars(module)["fp8_inverse"] = gathered

    def remove(self) -> None:
        self._module.__class__ = self._own
        for name in ("fp8_weight", "fp8_inverse"):
            vars(self._module).pop(name, None)
