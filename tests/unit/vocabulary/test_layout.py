"""Where parameters lie in a buffer, and how it is cut into them."""

from shardwise.vocabulary.layout import BufferCut, cut_out, lay_out


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
