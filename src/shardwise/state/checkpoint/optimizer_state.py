"""An optimizer's state by full names: slices that are cut like the parameters, and numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.base.errors import CheckpointError
from shardwise.engine.owned_model import OwnedSlice
from shardwise.state.checkpoint.manifest import OPTIMIZER
from shardwise.state.checkpoint.typed import dtype_name, dtype_of, from_json, to_json

# Marks a state of the parameter's shape in the manifest, with its dtype instead of its value.
_LIKE_PARAMETER = "__like_parameter__"
# Marks a state of another shape, with its dtype and that shape.
_SHAPED = "__shaped__"


class ToJson(Protocol):
    """Returns a value in JSON's types; see typed.to_json."""

    def __call__(self, value: Any, *, what: str) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceState:
    """A state, or this rank's slice of it, under its name in a checkpoint."""

    name: str
    of: OwnedSlice
    value: Tensor


def describe_optimizer(
    optimizer: Optimizer,
    *,
    slices: Sequence[OwnedSlice],
    groups: Sequence[Sequence[str]],
    to_json: ToJson = to_json,
) -> tuple[dict[str, Any], list[SliceState]]:
    """Return (what the manifest says, what is written as tensors) of the slices that this rank holds."""
    numbers = _keys_of_numbers(optimizer, slices)
    states: dict[str, dict[str, Any]] = {}
    tensors = []
    for held in slices:
        for key, value in optimizer.state.get(held.parameter, {}).items():
            what = f"the optimizer's {key} of {held.name}"
            described = states.setdefault(held.name, {})
            if (
                isinstance(value, Tensor)
                and value.shape == held.parameter.shape
                and (value.dim() or key not in numbers)
            ):
                described[key] = {_LIKE_PARAMETER: dtype_name(value.dtype)}
                tensors.append(SliceState(name=f"{OPTIMIZER}{key}.{held.name}", of=held, value=value))
            elif isinstance(value, Tensor) and (value.numel() != 1 or _is_by_blocks(held, value.shape)):
                part = _slice_of_state(held, value, what=what)
                described[key] = {_SHAPED: [dtype_name(value.dtype), list(part.shape)]}
                tensors.append(SliceState(name=f"{OPTIMIZER}{key}.{held.name}", of=part, value=value))
            else:
                described[key] = to_json(value, what=what)
    options = [
        {key: to_json(value, what=f"param_groups.{key}") for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    described_groups = [
        {"params": list(names), "options": option} for names, option in zip(groups, options, strict=True)
    ]
    return {"kind": type(optimizer).__name__, "groups": described_groups, "state": states}, tensors


def _keys_of_numbers(optimizer: Optimizer, slices: Sequence[OwnedSlice]) -> set[str]:
    """Return the keys of states that are one number: a parameter without dimensions does not show that by itself."""
    return {"step"} | {
        key
        for held in slices
        if held.parameter.dim() > 0
        for key, value in optimizer.state.get(held.parameter, {}).items()
        if isinstance(value, Tensor) and value.dim() == 0
    }


def _is_by_blocks(held: OwnedSlice, shape: Sequence[int]) -> bool:
    """Return whether a state of this shape has one value per block of the slice."""
    return held.block > 1 and tuple(shape) == (-(-held.parameter.numel() // held.block),)


def _slice_of_state(held: OwnedSlice, value: Tensor, *, what: str) -> OwnedSlice:
    """Return which elements this rank holds of a state whose shape is not the parameter's."""
    if _is_by_blocks(held, value.shape):
        return held.by_blocks()
    if not held.is_whole:
        raise CheckpointError(
            f"{what} has shape {tuple(value.shape)}: neither the parameter's, {held.shape}, nor one number, so it "
            "cannot be cut into slices"
        )
    return replace(held, shape=tuple(value.shape), start=0, stop=value.numel())


class OptimizerLoad:
    """New states for an optimizer: allocated if missing, filled by the caller, then given to the optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        saved: Mapping[str, Any],
        *,
        slices: Sequence[OwnedSlice],
        groups: Sequence[Sequence[str]],
    ) -> None:
        self._optimizer = optimizer
        self._options = [from_json(group["options"]) for group in saved["groups"]]
        self._check(saved, groups=groups)
        self.tensors: list[SliceState] = []
        self._numbers: list[tuple[Tensor, Tensor]] = []
        self._states: dict[Tensor, dict[str, Any]] = {}
        options = {name: option for names, option in zip(groups, self._options, strict=True) for name in names}
        for held in slices:
            if held.name in saved["state"]:
                self._states[held.parameter] = {
                    key: self._make(held, key, value, options=options.get(held.name, {}))
                    for key, value in saved["state"][held.name].items()
                }

    def _check(self, saved: Mapping[str, Any], *, groups: Sequence[Sequence[str]]) -> None:
        kind = type(self._optimizer).__name__
        if saved["kind"] != kind:
            raise CheckpointError(f"the checkpoint holds the state of {saved['kind']}, and this optimizer is {kind}")
        if len(saved["groups"]) != len(groups):
            raise CheckpointError(
                f"the checkpoint's optimizer has {len(saved['groups'])} param groups, this one {len(groups)}"
            )
        for number, (group, names) in enumerate(zip(saved["groups"], groups, strict=True)):
            different = set(group["params"]) ^ set(names)
            if different:
                name = min(different)
                where = "the checkpoint" if name in group["params"] else "this optimizer"
                raise CheckpointError(f"param group {number} holds {name} only in {where}")

    def _make(self, held: OwnedSlice, key: str, value: Any, *, options: Mapping[str, Any]) -> Any:
        """Return the tensor to fill, or the number. An existing tensor is reused: a graph may read it."""
        there = self._optimizer.state.get(held.parameter, {}).get(key)
        if isinstance(value, dict) and _LIKE_PARAMETER in value:
            dtype = dtype_of(value[_LIKE_PARAMETER])
            if not isinstance(there, Tensor) or there.shape != held.parameter.shape or there.dtype != dtype:
                there = held.empty_state(dtype)
            self.tensors.append(SliceState(name=f"{OPTIMIZER}{key}.{held.name}", of=held, value=there))
            return there
        if isinstance(value, dict) and _SHAPED in value:
            dtype, shape = dtype_of(value[_SHAPED][0]), tuple(value[_SHAPED][1])
            part = self._slice_of_state(held, shape, what=f"the optimizer's {key} of {held.name}")
            num_elements = part.stop - part.start
            size = shape if num_elements == prod(shape) else (num_elements,)
            if not isinstance(there, Tensor) or tuple(there.shape) != size or there.dtype != dtype:
                there = torch.empty(size, dtype=dtype, device=held.parameter.device)
            self.tensors.append(SliceState(name=f"{OPTIMIZER}{key}.{held.name}", of=part, value=there))
            return there
        number = from_json(value)
        if not isinstance(number, Tensor):
            return number
        # As in torch: a step count that kernels read is on their device, any other on the CPU.
        read_by_kernels = options.get("capturable") or options.get("fused")
        device = held.parameter.device if read_by_kernels else torch.device("cpu")
        if not _alike(there, number) or there.device != device:
            there = torch.empty_like(number, device=device)
        self._numbers.append((there, number))
        return there

    def _slice_of_state(self, held: OwnedSlice, shape: tuple[int, ...], *, what: str) -> OwnedSlice:
        """Return which elements of a state of this shape this rank will hold."""
        if held.block > 1 and held.by_blocks().shape == shape:
            return held.by_blocks()
        if not held.is_whole:
            raise CheckpointError(
                f"{what} has shape {shape} in the checkpoint, the parameter {held.shape}, of which this rank holds a "
                "slice: load it under strategy = 'ddp', or with an optimizer that steps it whole"
            )
        return replace(held, shape=shape, start=0, stop=prod(shape))

    @torch.no_grad()
    def take(self) -> None:
        """Give the filled states and the saved options to the optimizer."""
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            for key, value in options.items():
                if _alike(group.get(key), value):
                    group[key].copy_(value)
                else:
                    group[key] = value
        for there, number in self._numbers:
            there.copy_(number)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._states)


def _alike(there: Any, new: Any) -> bool:
    """Return whether `there` is a tensor that can hold the values of `new`."""
    both = isinstance(there, Tensor) and isinstance(new, Tensor)
    return both and there.shape == new.shape and there.dtype == new.dtype
