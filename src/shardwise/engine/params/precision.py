"""Which dtype computes, which one is stepped, and which one sums."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwise.errors import InvalidPlan
from shardwise.patterns import unmatched
from shardwise.plan import Plan
from shardwise.spec import ModelSpec, TensorSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(plan: Plan, own: torch.dtype, *, param: TensorSpec) -> torch.dtype:
    """What a parameter of dtype `own` computes in; what is not floating point stays as it is."""
    if plan.precision == "native" or not own.is_floating_point:
        return own
    return torch.float32 if param.keep_fp32 or plan.keeps_fp32(param.name) else DTYPES[plan.precision]


def master_dtype(plan: Plan, own: torch.dtype) -> torch.dtype:
    """What the optimizer steps."""
    if plan.precision == "native" or not own.is_floating_point:
        return own
    return torch.float32


def input_dtype(plan: Plan) -> torch.dtype | None:
    """What the model's inputs are cast to; None leaves them alone."""
    return None if plan.precision == "native" else DTYPES[plan.precision]


def reduce_dtype(plan: Plan) -> torch.dtype:
    return DTYPES[plan.reduce_dtype]


def check_kept(model: nn.Module, *, spec: ModelSpec, plan: Plan) -> None:
    """Refuse patterns that name nothing, and a parameter that two modules share of which one is kept in fp32."""
    for pattern in unmatched(plan.keep_fp32, (path for path, _ in model.named_modules())):
        raise InvalidPlan(f"keep_fp32: {pattern} matches no module of the model")
    for param in (param for unit in spec.units for param in unit.params):
        kept = {plan.keeps_fp32(name): name for name in (param.name, *param.aliases)}
        if len(kept) > 1:
            raise InvalidPlan(
                f"keep_fp32 names {kept[True]} and not {kept[False]}, one parameter: name both modules or none"
            )


def keep_in_fp32(model: nn.Module, *, plan: Plan) -> list[Any]:
    """Modules that the plan keeps in fp32 get their inputs cast up, and give their outputs back in the plan's dtype."""
    if plan.precision in ("native", "fp32"):
        return []
    handles: list[Any] = []
    for path, module in model.named_modules():
        if plan.keeps_fp32(path) and not plan.keeps_fp32(path.rpartition(".")[0]):
            handles.append(module.register_forward_pre_hook(_cast_up, with_kwargs=True))
            handles.append(module.register_forward_hook(partial(_cast_back, DTYPES[plan.precision])))
    return handles


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor in a structure of them."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def _cast_up(module: nn.Module, inputs: Any, options: Any) -> Any:
    return cast((inputs, options), torch.float32)


def _cast_back(dtype: torch.dtype, module: nn.Module, inputs: Any, output: Any) -> Any:
    return cast(output, dtype)
