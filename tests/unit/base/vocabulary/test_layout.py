"""Where parameters lie in a buffer, and how it is cut into them."""

import pytest
import torch
from torch import Tensor

from shardwise.base.vocabulary.layout import BufferCut, cut_out, lay_out


def test_gaps_are_pieces_of_their_own_and_parts_are_found_among_them() -> None:
    assert cut_out([(2, 5), (5, 6), (8, 10)], end=12) == BufferCut(sizes=(2, 3, 1, 2, 2, 2), places=(1, 2, 4))


def test_where_nothing_lies_between_there_are_no_empty_pieces() -> None:
    assert cut_out([(0, 4), (4, 8)], end=8) == BufferCut(sizes=(4, 4), places=(0, 1))


def test_a_part_without_elements_keeps_its_place() -> None:
    assert cut_out([(0, 4), (4, 4), (4, 6)], end=6) == BufferCut(sizes=(4, 0, 2), places=(0, 1, 2))


def test_a_layout_is_cut_into_its_parameters() -> None:
    layout = lay_out([(3,), (4, 8), (5,)], num_slices=2)
    cut = layout.cut()
    assert sum(cut.sizes) == layout.num_elements
    assert [cut.sizes[place] for place in cut.places] == [3, 32, 5]
    starts = [sum(cut.sizes[:place]) for place in cut.places]
    assert starts == list(layout.offsets)


@pytest.mark.parametrize(("num_slices", "num_pieces"), [(1, 3), (2, 2), (3, 5), (4, 40)])
def test_pieces_have_every_element_once_and_the_same_part_of_each_slice(num_slices: int, num_pieces: int) -> None:
    layout = lay_out([(33, 7), (5,), (0, 3), (400,), (64, 3)], num_slices=num_slices)
    values = torch.arange(layout.num_elements)
    slices = values.view(num_slices, -1)
    grads = [values[offset : offset + size] for offset, size in layout.sizes()]
    found: list[list[Tensor]] = [[] for _ in grads]
    ends = [0]
    for number in range(num_pieces):
        piece = layout.piece(number, num_pieces=num_pieces)
        assert piece.start == ends[-1]
        ends.append(piece.stop)
        assert piece.is_last == (number == num_pieces - 1)
        buffer = slices[:, piece.start : piece.stop].reshape(-1)
        assert buffer.numel() == piece.num_elements == sum(piece.cut.sizes)
        places = buffer.split(piece.cut.sizes)
        for (index, start, stop), place in zip(piece.parts, piece.cut.places, strict=True):
            assert torch.equal(places[place], grads[index][start:stop])
            found[index].append(grads[index][start:stop])
    assert ends[-1] == layout.slice_elements
    for grad, parts in zip(grads, found, strict=True):
        elements = torch.cat(parts) if parts else grad[:0]
        assert torch.equal(elements.sort().values, grad)
