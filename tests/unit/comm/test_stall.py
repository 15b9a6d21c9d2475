"""Who holds up a job, from where its ranks stand."""

from dataclasses import replace

import pytest

from shardwise.comm.rank_progress import Standing
from shardwise.comm.stall import Stall, find_stall

# Two ranks that wait for a third, which has stopped between two steps; for 10 s.
WAITS = Standing(
    rank=0, step=4, count=3, phase="forward", last="gather blocks.1", waits_for="gather blocks.1", idle_seconds=10
)
STOPPED = Standing(rank=2, step=4, phase="between steps", last="update (root)", idle_seconds=12)
RANKS = [WAITS, replace(WAITS, rank=1), STOPPED]


def found(ranks: list[Standing], *, limit_seconds: float = 8, waits_on_host: bool = True) -> Stall | None:
    return find_stall(ranks, limit_seconds=limit_seconds, silence_seconds=5, waits_on_host=waits_on_host)


def test_the_rank_that_is_behind_is_named_with_what_the_others_wait_in() -> None:
    stall = found(RANKS)
    assert stall == Stall(
        rank=2,
        text="rank 2 stopped (has issued nothing for 12 s): step 4, between steps, after update (root); "
        "ranks 0, 1 waiting in gather blocks.1, step 4, forward",
    )


def test_nobody_is_named_before_the_limit() -> None:
    assert found(RANKS, limit_seconds=11) is None


def test_a_rank_that_is_behind_but_moves_is_left_alone() -> None:
    assert found([*RANKS[:2], replace(STOPPED, idle_seconds=1)]) is None
    # Also where another waits for it a little further back than the rest.
    assert found([WAITS, replace(WAITS, rank=1, count=2), replace(STOPPED, idle_seconds=1)]) is None


def test_a_pause_of_all_ranks_is_no_stall() -> None:
    paused = [replace(STOPPED, rank=rank) for rank in range(3)]
    assert found(paused) is None
    assert found(paused, waits_on_host=False) is None


@pytest.mark.parametrize("waits_on_host", [True, False])
def test_a_silent_process_is_named_even_at_the_operation_of_the_others(waits_on_host: bool) -> None:
    silent = replace(WAITS, rank=2, waits_for="", silent_seconds=9)
    stall = found([*RANKS[:2], silent], waits_on_host=waits_on_host)
    assert stall is not None
    assert "rank 2 stopped (has not answered for 9 s): at or before gather blocks.1, step 4, forward" in stall.text


def test_where_only_devices_wait_a_rank_that_is_behind_is_named() -> None:
    ahead = [replace(rank, waits_for="") for rank in RANKS[:2]]
    assert found([*ahead, STOPPED]) is None
    stall = found([*ahead, STOPPED], waits_on_host=False)
    assert stall is not None
    assert stall.rank == 2


def test_a_rank_that_has_ended_is_named() -> None:
    stall = found([*RANKS[:2], replace(STOPPED, left=True, idle_seconds=0)])
    assert stall is not None
    assert "rank 2 stopped (has ended)" in stall.text


def test_ranks_that_all_wait_at_one_point_are_told_with_where_each_is() -> None:
    stall = found([WAITS, replace(WAITS, rank=1, waits_for="reduce blocks.0")])
    assert stall is not None
    assert "rank 0 in gather blocks.1, step 4, forward; rank 1 in reduce blocks.0, step 4, forward" in stall.text
