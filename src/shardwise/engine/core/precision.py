"""Casts of inputs and outputs as the plan's precision asks for; which dtype is which says dtypes.py."""

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_map_only

from shardwise.base.errors import InvalidPlan
from shardwise.base.vocabulary.dtypes import PRECISIONS
from shardwise.plan import Plan
from shardwise.plan.patterns import unmatched
from shardwise.program.spec import ModelSpec
from shardwise.program.units import called_modules


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def planned_dtype(precision: str) -> torch.dtype:
    """Return the dtype that a plan calls fp32, bf16 or fp16."""
    return torch_dtype(PRECISIONS[precision])


def attach_casts(model: nn.Module, *, plan: Plan) -> list[Any]:
    """Cast the model's floating-point inputs to what it computes in, and around modules that are kept in fp32."""
    if plan.precision == "native":
        return []
    dtype = planned_dtype(plan.precision)
    inputs = partial(cast_inputs, dtype)
    handles: list[Any] = [
        called.register_forward_pre_hook(inputs, with_kwargs=True) for called in called_modules(model)
    ]
    if dtype is torch.float32:
        return handles
    modules = dict(model.named_modules())
    for path, module in modules.items():
        above, _, _ = path.rpartition(".")
        if not plan.keeps_fp32(above) and (plan.keeps_fp32(path) or _computes_in_fp32(module, of=modules[above])):
            handles.append(module.register_forward_pre_hook(partial(cast_inputs, torch.float32), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(_cast_back, dtype)))
    return handles


def _computes_in_fp32(module: nn.Module, *, of: nn.Module) -> bool:
    """Return whether it makes a weight from another one and from fp32 buffers, as spectral_norm does."""
    is_parametrization = isinstance(of, ParametrizationList)
    return is_parametrization and any(buffer.dtype is torch.float32 for buffer in module.buffers())


def check_kept(model: nn.Module, *, spec: ModelSpec, plan: Plan) -> None:
    """Refuse patterns that name nothing, and a parameter that two modules share of which one is kept in fp32."""
    for name in ("keep_fp32", "keep_bf16"):
        for pattern in unmatched(getattr(plan, name), (path for path, _ in model.named_modules())):
            raise InvalidPlan(f"{name}: {pattern} matches no module of the model")
    for param in (param for unit in spec.units for param in unit.params):
        kept = {plan.keeps_fp32(name): name for name in (param.name, *param.aliases)}
        if len(kept) > 1:
            raise InvalidPlan(
                f"keep_fp32 names {kept[True]} and not {kept[False]}, one parameter: name both modules or none"
            )


def warn_upcast(spec: ModelSpec, *, plan: Plan) -> None:
    """Warn where a model in half precision computes in fp32, which is a plan's default."""
    params = [param for unit in spec.units for param in unit.params]
    narrow = [param for param in params if param.dtype in (PRECISIONS["bf16"], PRECISIONS["fp16"])]
    if plan.precision != "fp32" or not narrow:
        return
    word = next(word for word, dtype in PRECISIONS.items() if dtype == narrow[0].dtype)
    warnings.warn(
        f"{len(narrow)} of {len(params)} parameters are {narrow[0].dtype} ({narrow[0].name}) and compute in fp32 under "
        f"precision = 'fp32', twice the memory: precision = {word!r} computes in {word} and steps fp32 masters, "
        "'native' leaves them as they are",
        stacklevel=4,
    )


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor in a structure of them."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def cast_inputs(dtype: torch.dtype, module: nn.Module, inputs: Any, options: Any) -> Any:
    """Cast a module's inputs: a forward pre-hook (with_kwargs)."""
    return cast((inputs, options), dtype)


def _cast_back(dtype: torch.dtype, module: nn.Module, inputs: Any, output: Any) -> Any:
    return cast(output, dtype)
