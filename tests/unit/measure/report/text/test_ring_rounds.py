"""The ring is played on names, so that a value that is lost or added twice shows."""

import pytest

from shardwise.measure.report.text.ring_rounds import explain_ring, ring_as_data, rounds


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_every_rank_ends_with_every_value_added_once(num_ranks: int) -> None:
    played = list(rounds(num_ranks))
    assert len(played) == 2 * (num_ranks - 1)
    if played:
        everyone = list(range(num_ranks))
        assert all(sorted(cell) == everyone for row in played[-1].cells for cell in row)


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_after_the_first_half_rank_r_has_the_sum_of_chunk_r_and_of_no_other(num_ranks: int) -> None:
    halfway = list(rounds(num_ranks))[num_ranks - 2]
    assert halfway.part == "reduce-scatter"
    for rank, row in enumerate(halfway.cells):
        assert [chunk for chunk, cell in enumerate(row) if len(cell) == num_ranks] == [rank]


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_the_sum_of_a_chunk_is_the_same_on_all_ranks_also_in_its_order(num_ranks: int) -> None:
    """Floating-point sums depend on their order."""
    last = list(rounds(num_ranks))[-1]
    assert all(len({row[chunk] for row in last.cells}) == 1 for chunk in range(num_ranks))


@pytest.mark.parametrize("num_ranks", range(2, 9))
def test_in_a_round_one_chunk_of_each_rank_changes_and_comes_from_the_left(num_ranks: int) -> None:
    previous = tuple(tuple((rank,) for _ in range(num_ranks)) for rank in range(num_ranks))
    for round_ in rounds(num_ranks):
        for rank in range(num_ranks):
            chunk = round_.received(rank)
            came = previous[rank - 1][chunk]
            kept = previous[rank][chunk] if round_.part == "reduce-scatter" else ()
            assert round_.cells[rank][chunk] == came + kept
            others = [other for other in range(num_ranks) if other != chunk]
            assert all(round_.cells[rank][other] == previous[rank][other] for other in others)
        previous = round_.cells


def test_three_ranks_send_what_the_engines_ring_sends() -> None:
    """The table in the docstring of comm/groups/ring.py."""
    assert [round_.sent for round_ in rounds(3)] == [(2, 0, 1), (1, 2, 0), (0, 1, 2), (2, 0, 1)]


@pytest.mark.parametrize("num_ranks", [*range(1, 18), 32, 33, 1000])
def test_the_picture_is_80_columns_wide(num_ranks: int) -> None:
    lines = explain_ring(num_ranks=num_ranks)
    assert all(len(line) <= 80 and line == line.rstrip() for line in lines)


def test_the_picture_of_two_ranks() -> None:
    assert explain_ring(num_ranks=2) == [
        "ring all-reduce on 2 ranks: each cuts its values into as many chunks,",
        "and in every round sends one of them to the next rank (the last one to rank 0)",
        "a: rank 0's values, b: rank 1's; Σ: a+b; + and = mark what just arrived",
        "",
        "── reduce-scatter: what arrives is added; rank r ends with the sum of chunk r ──",
        "         round 1 of 1",
        "  chunk   0  1",
        "  rank 0 +Σ  a",
        "  rank 1  b +Σ",
        "",
        "── all-gather: what arrives is kept as it is ───────────────────────────────────",
        "         round 1 of 1",
        "  chunk   0  1",
        "  rank 0  Σ =Σ",
        "  rank 1 =Σ  Σ",
        "",
        "each half takes 1 round, and in each a rank sends 1/2 of the bytes:",
        "  reduce-scatter   (n-1)/n = 0.500 of the bytes",
        "  all-gather       (n-1)/n = 0.500",
        "  all-reduce      2(n-1)/n = 1.000, less than 2 however many ranks there are",
    ]


def test_the_data_names_the_summands() -> None:
    data = ring_as_data(num_ranks=2)
    assert data["sent_of_bytes"] == 1.0
    assert data["rounds"][0] == {
        "part": "reduce-scatter",
        "round": 1,
        "sent": [1, 0],
        "summands": [[[0, 1], [0]], [[1], [0, 1]]],
    }
    assert ring_as_data(num_ranks=5000)["rounds"] is None
