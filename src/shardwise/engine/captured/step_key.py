"""The key of a step, which must be equal for a graph to be replayed: forms of its inputs, modes, and Python state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec, tree_flatten

from shardwise.engine.core.parameters import unguarded
from shardwise.engine.core.pass_state import PassState
from shardwise.engine.graphs.python_state import PLAIN, PythonState, Values
from shardwise.engine.graphs.reads import NotCaptured
from shardwise.engine.graphs.torch_modes import torch_modes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepKey:
    """The key of a step.

    inputs       the tree of a step's inputs, with the keys of dicts in their order
    leaves       for each leaf, a tensor's shape, strides and dtype; or the plain value itself
    modes        torch's modes and flags, the pass's weight, which parameters are trained
    state        plain values that the step's Python can read, and the addresses of buffers
    """

    inputs: TreeSpec
    leaves: tuple[Any, ...]
    modes: tuple[Any, ...]
    state: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The inputs of a step as the leaves of a tree."""

    leaves: list[Any]
    tree: TreeSpec


def flatten_inputs(inputs: Any) -> StepInputs:
    leaves, tree = tree_flatten(inputs)
    return StepInputs(leaves=leaves, tree=tree)


def step_key(
    inputs: StepInputs,
    *,
    device: torch.device,
    parameters: Sequence[nn.Parameter],
    passes: PassState,
    state: PythonState,
) -> StepKey:
    """Return the key of a step. Raises NotCaptured for inputs that a graph cannot take."""
    return StepKey(
        inputs=inputs.tree,
        leaves=tuple(_form(leaf, device=device) for leaf in inputs.leaves),
        modes=(*torch_modes(device.type), *_pass(passes), *_trained(parameters)),
        state=(state.values(), state.addresses()),
    )


def _form(leaf: Any, *, device: torch.device) -> tuple[Any, ...]:
    if isinstance(leaf, PLAIN):
        # With its type, because True == 1 == 1.0, and a step may tell them apart.
        return (type(leaf), leaf)
    if type(leaf) is not Tensor:
        raise NotCaptured(
            f"the step is given a {type(leaf).__name__}, in which no tensors are found: give it tensors and plain "
            "values, or tuples, lists and dicts of them"
        )
    if leaf.device != device:
        raise NotCaptured(f"the step is given a tensor on {leaf.device}: move batches to {device} before the step")
    if leaf.requires_grad:
        raise NotCaptured("the step is given a tensor that requires a gradient")
    return (leaf.shape, leaf.stride(), leaf.dtype)


def _pass(passes: PassState) -> tuple[Any, ...]:
    return (passes.accumulating, passes.num_counting, passes.counts, passes.source)


def _trained(parameters: Sequence[nn.Parameter]) -> Values:
    with unguarded():
        return tuple(parameter.requires_grad for parameter in parameters)


def optimizer_key(optimizer: Optimizer) -> tuple[Any, ...]:
    """Return the part of an optimizer that graphs contain: options, and addresses of parameters, state and rates."""
    options = [
        (key, value.data_ptr() if isinstance(value, Tensor) else value)
        for group in optimizer.param_groups
        for key, value in group.items()
        if key != "params"
    ]
    stepped = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    state = [
        value.data_ptr() if isinstance(value, Tensor) else value
        for values in optimizer.state.values()
        for value in values.values()
    ]
    return (options, stepped, state)
