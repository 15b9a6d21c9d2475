"""A slice of a flattened tensor as ordinary boxes, which torch.distributed.checkpoint's planners can reshard.

    shape (4, 5), elements 3 to 17     . . . a a      a  row 0, columns 3 and 4
                                       b b b b b      b  rows 1 and 2, whole
                                       b b b b b      c  row 3, columns 0 and 1
                                       c c . . .

At most 2·ndim − 1 boxes: one of whole rows, and on each side of it a part of a row, which is cut in the same way but is
open on one side only, so that it gives ndim − 1. Every box is contiguous in the flattened tensor, in this order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from shardwise.base.torch_internals import torch_private


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Elements offsets[d] ≤ i_d < offsets[d] + sizes[d] of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.sizes)

    def inside(self, shape: Sequence[int]) -> bool:
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            offset >= 0 and size >= 0 and offset + size <= full
            for offset, size, full in zip(self.offsets, self.sizes, shape, strict=True)
        )


def cut(shape: Sequence[int], *, start: int, stop: int) -> list[Box]:
    """Return the boxes of elements `start` to `stop` of a tensor of this shape, in order."""
    if start >= stop:
        return []
    if not shape:
        return [Box(offsets=(), sizes=())]
    row = prod(shape[1:])
    first_whole, end_whole = -(-start // row), stop // row
    if first_whole > end_whole:
        return _in_row(shape, end_whole, start=start - end_whole * row, stop=stop - end_whole * row)
    boxes = _in_row(shape, first_whole - 1, start=start - (first_whole - 1) * row, stop=row)
    if first_whole < end_whole:
        offsets = (first_whole, *(0 for _ in shape[1:]))
        boxes.append(Box(offsets=offsets, sizes=(end_whole - first_whole, *shape[1:])))
    return boxes + _in_row(shape, end_whole, start=0, stop=stop - end_whole * row)


def _in_row(shape: Sequence[int], row: int, *, start: int, stop: int) -> list[Box]:
    inner = cut(shape[1:], start=start, stop=stop)
    return [Box(offsets=(row, *box.offsets), sizes=(1, *box.sizes)) for box in inner]


def covers(boxes: Sequence[Box], *, shape: Sequence[int]) -> bool:
    """Return whether boxes inside a tensor of this shape hold each of its elements once.

    Boxes that are contiguous in the flattened tensor are compared in order; others are compared in pairs. All boxes
    that we write are contiguous.
    """
    if sum(box.num_elements for box in boxes) != prod(shape):
        return False
    filled = [box for box in boxes if box.num_elements]
    if all(_contiguous(box, shape) for box in filled):
        spans = sorted((flat_index(box.offsets, shape), box.num_elements) for box in filled)
        return all(start + size <= after for (start, size), (after, _) in pairwise(spans))
    return not any(_overlap(one, other) for one, other in combinations(filled, 2))


def _contiguous(box: Box, shape: Sequence[int]) -> bool:
    """Return whether it has single entries in the first dimensions, then a range, then all entries."""
    sizes = list(zip(box.sizes, shape, strict=True))
    while sizes and sizes[0][0] == 1:
        sizes.pop(0)
    return all(size == full for size, full in sizes[1:])


def flat_index(offsets: Sequence[int], shape: Sequence[int]) -> int:
    """Return the index in the flattened tensor."""
    index = 0
    for offset, size in zip(offsets, shape, strict=True):
        index = index * size + offset
    return index


def _overlap(one: Box, other: Box) -> bool:
    return all(
        a < b + other_size and b < a + one_size
        for a, one_size, b, other_size in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


def share(*, start: int, stop: int, copy: int, num_copies: int) -> tuple[int, int]:
    """Return the part of a slice that rank `copy` of the ranks that hold it writes: all write about the same amount."""
    size = stop - start
    return start + size * copy // num_copies, start + size * (copy + 1) // num_copies


class Boxes(Tensor):
    """A leaf of a state dict: `elements` are those of a tensor of this shape from `start` on.

    A tensor without memory that implements the methods which torch.distributed.checkpoint calls on sharded tensors.
    """

    @staticmethod
    def __new__(cls, elements: Tensor, *, shape: Sequence[int], start: int) -> "Boxes":
        made: Boxes = torch_private.make_wrapper_subclass(
            cls, tuple(shape), dtype=elements.dtype, device=elements.device
        )
        made.boxes = cut(shape, start=start, stop=start + elements.numel())
        if not prod(shape):
            # A box without elements, so that the checkpoint lists the tensor.
            made.boxes = [Box(offsets=(0,) * len(shape), sizes=tuple(shape))]
        parts = torch.split(elements, [box.num_elements for box in made.boxes]) if made.boxes else ()
        made._views = {box.offsets: part.view(box.sizes) for part, box in zip(parts, made.boxes, strict=True)}
        made.start, made.elements = start, elements
        return made

    start: int
    elements: Tensor
    boxes: list[Box]
    _views: dict[tuple[int, ...], Tensor]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes)) for box in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._views[tuple(index.offset)]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        raise NotImplementedError(f"{function}: boxes are saved and loaded, and nothing else")
