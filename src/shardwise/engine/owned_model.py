"""What one rank holds of a model, as checkpoints and the profiler read it."""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn

from shardwise.engine.core.parameters import unguarded


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedSlice:
    """Elements `start` to `stop` of a parameter, counted through all its dimensions.

    parameter    the tensor that the optimizer steps: those elements, in one dimension or in the parameter's own shape
    holders      the ranks that hold equal elements; `copy` is the index of this rank among them
    block        slices begin at multiples of this many elements, for an optimizer that works on blocks
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    parameter: nn.Parameter
    copy: int
    holders: tuple[int, ...]
    block: int = 1

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop == prod(self.shape)

    def empty_state(self, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory for a state of this slice."""
        with unguarded():
            return torch.empty_like(self.parameter, dtype=dtype, requires_grad=False)

    def by_blocks(self) -> "OwnedSlice":
        """Return the same slice of a tensor that has one value per block."""
        shape = (-(-prod(self.shape) // self.block),)
        return replace(self, shape=shape, start=self.start // self.block, stop=-(-self.stop // self.block), block=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedModel:
    """A model as one rank holds it. A tied parameter goes by its first name.

    stepped      the slices as optimizers step them: a matrix that this rank owns is one whole slice
    parameters   name → full shape, and the dtype in which it is stepped; includes parameters of other ranks
    buffers      name → value, of the buffers that belong to a state dict
    aliases      other name → first name
    """

    slices: list[OwnedSlice]
    stepped: list[OwnedSlice]
    parameters: dict[str, tuple[tuple[int, ...], torch.dtype]]
    buffers: dict[str, Any]
    aliases: dict[str, str]
