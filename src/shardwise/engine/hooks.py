"""Module and autograd hooks → events for the runner: two hooks a unit, one a parameter."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise.engine.runner import Runner
from shardwise.engine.unit import Unit


def attach_hooks(runner: Runner, *, input_dtype: torch.dtype | None) -> list[Any]:
    """Hook every unit's module; the root's floating-point inputs are cast to `input_dtype` first. Returns handles."""
    handles: list[Any] = []
    if input_dtype is not None:
        cast = partial(_cast_inputs, input_dtype)
        handles.append(runner.root.module.register_forward_pre_hook(cast, with_kwargs=True))
    for unit in runner.units.values():
        # Ours come before any hook of the user's, which may read the parameters, and after, likewise.
        before = partial(_before_forward, runner, unit)
        after = partial(_after_forward, runner, unit)
        handles.append(unit.module.register_forward_pre_hook(before, prepend=True))
        handles.append(unit.module.register_forward_hook(after, always_call=False))
    return handles


def _before_forward(runner: Runner, unit: Unit, module: nn.Module, inputs: Any) -> None:
    runner.before_forward(unit)


def _after_forward(runner: Runner, unit: Unit, module: nn.Module, inputs: Any, output: Any) -> None:
    differentiable = False
    if torch.is_grad_enabled() and not runner.recomputing():
        outputs = (output,) if isinstance(output, Tensor) else tree_leaves(output)
        announce = partial(_before_backward, runner, unit, unit.calls - 1)
        for tensor in outputs:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(announce)  # type: ignore[no-untyped-call]
                differentiable = True
    runner.after_forward(unit, differentiable=differentiable)


def _before_backward(runner: Runner, unit: Unit, call: int, grad: Tensor) -> None:
    runner.before_backward(unit, call)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, inputs: Any, options: Any) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, cast, (inputs, options))
