"""Slices that are cut in a regular way, as runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.state.checkpoint.slice_runs import SliceRun, cover, merged_runs, slices_between


@given(
    sizes=st.lists(st.sampled_from([1, 3, 3, 3, 8]), min_size=1, max_size=30),
    ranks=st.permutations(range(30)),
    regular=st.booleans(),
    data=st.data(),
)
def test_runs_hold_the_slices_that_they_were_made_of(
    sizes: list[int], ranks: list[int], regular: bool, data: st.DataObject
) -> None:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    owners = range(len(sizes)) if regular else ranks
    single = [SliceRun(start=a, size=size, rank=rank) for a, size, rank in zip(starts, sizes, owners, strict=False)]
    # As a tree merges them: in any two halves, each merged before.
    half = data.draw(st.integers(0, len(single)))
    runs = merged_runs((*merged_runs(single[half:]), *merged_runs(single[:half])))
    assert cover(runs, num_elements=sum(sizes))
    assert [one for run in runs for one in run.overlapping(0, sum(sizes))] == [
        (run.start, run.stop, run.rank) for run in single
    ]
    start = data.draw(st.integers(0, sum(sizes) - 1))
    stop = data.draw(st.integers(start + 1, sum(sizes)))
    expected = [(run.start, run.stop, run.rank) for run in single if run.start < stop and start < run.stop]
    assert list(slices_between(runs, start=start, stop=stop)) == expected


def test_equal_slices_of_many_ranks_are_one_run() -> None:
    single = [SliceRun(start=8 * rank, size=8, rank=3 * rank) for rank in range(1000)]
    assert merged_runs(single) == (SliceRun(start=0, size=8, rank=0, count=1000, stride=3),)


@pytest.mark.parametrize(
    "runs",
    [
        (SliceRun(start=0, size=4, rank=0),),
        (SliceRun(start=0, size=4, rank=0), SliceRun(start=5, size=5, rank=1)),
        (SliceRun(start=0, size=4, rank=0), SliceRun(start=3, size=7, rank=1)),
        (SliceRun(start=0, size=4, rank=0, count=3),),
    ],
    ids=["too short", "a gap", "an overlap", "too long"],
)
def test_slices_that_do_not_cover_a_tensor_once_are_found(runs: tuple[SliceRun, ...]) -> None:
    assert not cover(runs, num_elements=10)
