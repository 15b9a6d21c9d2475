"""A slice of a flattened tensor is a few boxes, which are those elements and no others."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from shardwise.state.checkpoint.boxes import Box, Boxes, covers, cut, share


@st.composite
def slices(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


@given(slices())
def test_boxes_are_the_elements_of_the_slice_in_order_and_at_most_2_ndim_less_1(
    case: tuple[tuple[int, ...], int, int],
) -> None:
    shape, start, stop = case
    numbers = torch.arange(prod(shape)).view(shape)
    boxes = cut(shape, start=start, stop=stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    found = []
    for box in boxes:
        part = numbers
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        assert box.inside(shape)
        found += part.reshape(-1).tolist()
    assert found == list(range(start, stop))


def test_2_ndim_less_1_boxes_are_needed_where_both_ends_lie_inside_rows() -> None:
    assert [len(cut((4,) * ndim, start=1, stop=4**ndim - 1)) for ndim in (1, 2, 3)] == [1, 3, 5]


@given(slices(), st.integers(1, 7))
def test_copies_share_a_slice_without_gap_and_to_one_element_equally(
    case: tuple[tuple[int, ...], int, int], num_copies: int
) -> None:
    _, start, stop = case
    shares = [share(start=start, stop=stop, copy=copy, num_copies=num_copies) for copy in range(num_copies)]
    assert [shares[0][0], *(end for _, end in shares)] == [*(begin for begin, _ in shares), stop]
    sizes = [end - begin for begin, end in shares]
    assert max(sizes) - min(sizes) <= 1


def test_a_box_is_a_view_of_the_slices_own_memory() -> None:
    elements = torch.zeros(14)
    boxes = Boxes(elements, shape=(4, 5), start=3)
    for chunk in boxes.__create_chunk_list__():
        boxes.__get_tensor_shard__(MetadataIndex("x", chunk.offsets)).fill_(1)
    assert elements.tolist() == [1.0] * 14


def test_a_tensor_without_elements_is_one_box() -> None:
    assert [box.sizes for box in Boxes(torch.zeros(0), shape=(0, 3), start=0).boxes] == [(0, 3)]


def box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
    return Box(offsets=offsets, sizes=sizes)


@pytest.mark.parametrize(
    ("shape", "boxes", "whole"),
    [
        ((4, 5), [box((0, 0), (2, 5)), box((2, 0), (1, 5)), box((3, 0), (1, 2)), box((3, 2), (1, 3))], True),
        ((4, 5), [box((0, 0), (4, 2)), box((0, 2), (4, 3))], True),
        ((), [box((), ())], True),
        ((0, 3), [box((0, 0), (0, 3))], True),
        ((4, 5), [box((0, 0), (3, 5))], False),
        ((4, 5), [box((0, 0), (2, 5)), box((1, 0), (2, 5))], False),
        ((4, 5), [box((0, 0), (4, 2)), box((0, 1), (4, 3))], False),
        ((2,), [], False),
    ],
)
def test_boxes_cover_a_tensor_where_each_element_is_in_one(
    shape: tuple[int, ...], boxes: list[Box], whole: bool
) -> None:
    assert covers(boxes, shape=shape) is whole
