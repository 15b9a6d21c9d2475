"""Values come back from JSON as they were, and what only pickle could write is refused."""

import json
import math
from typing import Any

import pytest
import torch

from shardwise.base.errors import CheckpointError
from shardwise.state.checkpoint.typed import from_json, to_json


def through_json(value: Any) -> Any:
    return from_json(json.loads(json.dumps(to_json(value, what="value"), allow_nan=False)))


@pytest.mark.parametrize(
    "value", [None, True, 3, 0.1, 1e-320, math.inf, "ü", [1, (2, [3.5])], {"betas": (0.9, 0.999), "a": {"b": None}}]
)
def test_values_come_back_as_they_were(value: Any) -> None:
    back = through_json(value)
    assert back == value
    assert type(back) is type(value)


def test_nan_comes_back() -> None:
    assert math.isnan(through_json(math.nan))


@pytest.mark.parametrize("tensor", [torch.tensor(0.1), torch.tensor([7]), torch.tensor(True), torch.tensor(math.inf)])
def test_tensors_of_one_number_come_back_with_dtype_and_shape(tensor: torch.Tensor) -> None:
    back = through_json(tensor)
    assert torch.equal(back, tensor)
    assert back.dtype == tensor.dtype


@pytest.mark.parametrize("value", [object(), {1, 2}, {3: 4}, b"bytes", torch.zeros(2), {"__tuple__": 1}])
def test_what_only_pickle_could_write_is_named(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"progress\.x"):
        to_json({"x": value}, what="progress")


def test_a_tensor_of_more_than_one_number_was_not_written_by_us() -> None:
    with pytest.raises(CheckpointError, match="where one number was written"):
        from_json({"__tensor__": 1.0, "dtype": "float32", "shape": [2**40]})
