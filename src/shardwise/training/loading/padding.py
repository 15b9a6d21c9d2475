"""Batches of fewer lengths: CUDA graphs are recorded for each length that a model is given.

transformers' own collators have `pad_to_multiple_of`; this does the same for any other collator.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.base.errors import InvalidData

# Tokens that are padding do not count: no attention to them, and no loss.
_VALUES = {"attention_mask": 0, "labels": -100}
_LENGTH_OF = "input_ids"


class PadToMultiple:
    """A collator that pads the batches of another one, a dict of tensors, to a multiple of some length.

    multiple   tokens; the tensors of a batch that are as long as its `input_ids` are padded at their end
    values     name of a tensor → what it is padded with (default: attention_mask 0, labels -100, others 0)
    """

    def __init__(
        self,
        collate: Callable[[Sequence[Any]], Mapping[str, Any]],
        *,
        multiple: int,
        values: Mapping[str, int] | None = None,
    ) -> None:
        if multiple < 1:
            raise InvalidData(f"PadToMultiple: multiple must be at least 1, not {multiple}")
        self._collate = collate
        self._multiple = multiple
        self._values = {**_VALUES, **(values or {})}

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        batch = dict(self._collate(samples))
        ids = batch.get(_LENGTH_OF)
        if not isinstance(ids, Tensor) or ids.dim() < 2:
            raise InvalidData(f"PadToMultiple: a batch must have {_LENGTH_OF} of the shape (samples, tokens)")
        if "attention_mask" not in batch:
            raise InvalidData(
                "PadToMultiple: the batch has no attention_mask, so that the model would read padding as text; let the "
                "collator return one"
            )
        length = ids.shape[1]
        missing = -length % self._multiple
        return {
            name: self._padded(name, value, missing=missing)
            if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == length
            else value
            for name, value in batch.items()
        }

    def _padded(self, name: str, tensor: Tensor, *, missing: int) -> Tensor:
        if not missing:
            return tensor
        end = tensor.new_full((tensor.shape[0], missing, *tensor.shape[2:]), self._values.get(name, 0))
        return torch.cat([tensor, end], dim=1)
