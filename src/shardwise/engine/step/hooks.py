"""Module and autograd hooks → events for the runner: two hooks a unit, one a parameter."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves

from shardwise.engine.params.precision import cast
from shardwise.engine.params.unit import Unit
from shardwise.engine.step.runner import Runner
from shardwise.spec import ANNOUNCED, NONE, UNANNOUNCED

_PLAIN = (int, float, complex, bool, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
# Of what a module keeps on itself nearly all is of these, which is found out faster than that it is no tensor.
_NO_TENSORS = frozenset({*_PLAIN, dict, OrderedDict, list, tuple, set})


def attach_hooks(runner: Runner, *, input_dtype: torch.dtype | None) -> list[Any]:
    """Hook every unit's module; the root's floating-point inputs are cast to `input_dtype` first. Returns handles."""
    handles: list[Any] = []
    if input_dtype is not None:
        inputs = partial(_cast_inputs, input_dtype)
        handles.append(runner.root.module.register_forward_pre_hook(inputs, with_kwargs=True))
    modules = {id(unit.module) for unit in runner.units.values()}
    for unit in runner.units.values():
        # Ours come before any hook of the user's, which may read the parameters, and after, likewise.
        before = partial(_before_forward, runner, unit)
        after = partial(_after_forward, runner, unit, [inner.__dict__ for inner in _own_modules(unit, modules)])
        handles.append(unit.module.register_forward_pre_hook(before, prepend=True))
        handles.append(unit.module.register_forward_hook(after, always_call=False))
    return handles


def _own_modules(unit: Unit, unit_modules: set[int]) -> Iterator[nn.Module]:
    """The unit's modules of the user's own making, which may keep a tensor on themselves (an auxiliary loss)."""
    waiting = [unit.module]
    while waiting:
        module = waiting.pop()
        if not type(module).__module__.startswith("torch.nn."):
            yield module
        waiting += [child for child in module.children() if id(child) not in unit_modules]


# torch.compile of a unit compiles its hooks along with its forward; what we do around a forward is not for it.
@_disable_dynamo
def _before_forward(runner: Runner, unit: Unit, module: nn.Module, inputs: Any) -> None:
    runner.before_forward(unit)


@_disable_dynamo
def _after_forward(
    runner: Runner, unit: Unit, attributes: list[dict[str, Any]], module: nn.Module, inputs: Any, output: Any
) -> None:
    if not torch.is_grad_enabled() or runner.recomputing():
        runner.after_forward(unit, backward=NONE)
        return
    backward = NONE
    for leaf in _leaves(output):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                _announce(leaf, runner=runner, unit=unit)
                backward = ANNOUNCED if backward is NONE else backward
        elif not isinstance(leaf, _PLAIN) and unit.trainable:
            backward = UNANNOUNCED
    for values in attributes:
        if _NO_TENSORS.issuperset(map(type, values.values())):
            continue
        for value in values.values():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                # A loss that is fetched from the module comes back by this way, and perhaps before the outputs.
                _announce(value, runner=runner, unit=unit)
                backward = ANNOUNCED if backward is NONE else backward
    runner.after_forward(unit, backward=backward)


def _leaves(output: Any) -> list[Any]:
    """What an output holds; also dataclasses, which torch's own trees do not look into."""
    if isinstance(output, Tensor):
        return [output]
    return [
        inner
        for leaf in tree_leaves(output)
        for inner in (
            (part for field in fields(leaf) for part in _leaves(getattr(leaf, field.name)))
            if is_dataclass(leaf) and not isinstance(leaf, type)
            else (leaf,)
        )
    ]


def _announce(tensor: Tensor, *, runner: Runner, unit: Unit) -> None:
    """When the gradient of `tensor` is there, backward comes to this call of the unit.

    Units that hand the same tensor on share one hook, which comes to the outermost first.
    """
    calls: list[tuple[Unit, int]] = []
    node, known = getattr(tensor, "_shardwise_announces", (None, calls))
    if node is tensor.grad_fn and known:
        calls = known
    else:
        # A tensor that was written into since has another gradient, and needs another hook.
        tensor._shardwise_announces = (tensor.grad_fn, calls)  # type: ignore[attr-defined]
        tensor.register_hook(partial(_before_backward, runner, calls))  # type: ignore[no-untyped-call]
    if (unit, unit.call) not in calls:
        calls.insert(0, (unit, unit.call))


def _before_backward(runner: Runner, calls: list[tuple[Unit, int]], grad: Tensor) -> None:
    for unit, call in calls:
        runner.before_backward(unit, call)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, inputs: Any, options: Any) -> Any:
    return cast((inputs, options), dtype)
