"""Python values in JSON and back, with their types: tuples, numbers that JSON lacks, tensors of one number."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.base.errors import CheckpointError

_TUPLE, _FLOAT, _TENSOR = "__tuple__", "__float__", "__tensor__"


def to_json(value: Any, *, what: str) -> Any:
    """Return `value` in JSON's types; `what` names it in the error if it cannot be written."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    if isinstance(value, Tensor) and value.numel() == 1:
        number = to_json(value.item(), what=what)
        return {_TENSOR: number, "dtype": dtype_name(value.dtype), "shape": list(value.shape)}
    if isinstance(value, tuple):
        return {_TUPLE: [to_json(item, what=what) for item in value]}
    if isinstance(value, list):
        return [to_json(item, what=what) for item in value]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key in (_TUPLE, _FLOAT, _TENSOR):
                raise CheckpointError(f"{what}: the key {key!r} cannot be written; keys are plain strings")
        return {key: to_json(item, what=f"{what}.{key}") for key, item in value.items()}
    raise CheckpointError(
        f"{what} is a {type(value).__name__}, which only pickle could write: use numbers, strings, lists, dicts"
    )


def from_json(value: Any) -> Any:
    """Return the value that `to_json` was given."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(from_json(item) for item in value[_TUPLE])
    if _FLOAT in value:
        return float(value[_FLOAT])
    if _TENSOR in value:
        if math.prod(value["shape"]) != 1:
            raise CheckpointError(f"a tensor of shape {value['shape']} where one number was written")
        return torch.full(value["shape"], from_json(value[_TENSOR]), dtype=dtype_of(value["dtype"]))
    return {key: from_json(item) for key, item in value.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"unknown dtype {name!r}")
    return dtype
