"""A collator that pads to a multiple."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise
from shardwise.base.errors import InvalidData


def collate(samples: list[int]) -> dict[str, Any]:
    length = max(samples)
    ids = torch.ones(len(samples), length, dtype=torch.int64)
    mask = torch.stack([torch.arange(length) < size for size in samples]).long()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.clone(),
        "weights": torch.ones(len(samples)),
        "n": 3,
    }


def test_tensors_as_long_as_the_tokens_are_padded_each_with_its_value() -> None:
    batch = shardwise.PadToMultiple(collate, multiple=4)([3, 6])
    assert {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, Tensor)} == {
        "input_ids": (2, 8),
        "attention_mask": (2, 8),
        "labels": (2, 8),
        "weights": (2,),
    }
    assert batch["attention_mask"].sum() == 9
    assert batch["labels"][:, 6:].unique().tolist() == [-100]
    assert batch["input_ids"][:, 6:].unique().tolist() == [0]
    assert batch["n"] == 3


def test_a_batch_of_a_multiple_stays_as_it_is() -> None:
    batch = shardwise.PadToMultiple(collate, multiple=4, values={"input_ids": 7})([8, 2])
    assert all(torch.equal(value, batch[name]) for name, value in collate([8, 2]).items() if isinstance(value, Tensor))


def test_other_values_are_used() -> None:
    assert shardwise.PadToMultiple(collate, multiple=4, values={"input_ids": 7})([3])["input_ids"][0, 3] == 7


def test_a_batch_without_a_mask_is_an_error() -> None:
    without = shardwise.PadToMultiple(lambda samples: {"input_ids": torch.ones(1, 3)}, multiple=4)
    with pytest.raises(InvalidData, match="attention_mask"):
        without([1])
    with pytest.raises(InvalidData, match="at least 1"):
        shardwise.PadToMultiple(collate, multiple=0)
