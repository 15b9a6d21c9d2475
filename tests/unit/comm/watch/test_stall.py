"""Who holds up a job, from where its ranks stand."""

from dataclasses import replace

import pytest

from shardwise.comm.groups.rank_progress import Standing
from shardwise.comm.watch.stall import Stall, find_missed, find_stall

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
        text="rank 2 stopped (has held up the others for 10 s and issues nothing): step 4, between steps, after update "
        "(root); ranks 0, 1 waiting in gather blocks.1, step 4, forward; where a rank's data end before those of others, "
        "use `for batch in shardwise.join(model, loader):`",
    )


def test_data_that_end_early_are_not_suspected_of_a_rank_that_stopped_in_its_step() -> None:
    stall = found([*RANKS[:2], replace(STOPPED, phase="forward", last="forward blocks.0")])
    assert stall is not None
    assert "shardwise.join" not in stall.text


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
    why = "has held up the others for 10 s and does not answer"
    assert f"rank 2 stopped ({why}): at or before gather blocks.1, step 4, forward" in stall.text


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


# Rank 0 waits for all ranks in a call between two steps, for 10 s.
MEETS = Standing(rank=0, step=4, phase="between steps", meeting="state_dict", idle_seconds=10)
GONE_ON = replace(WAITS, rank=1)


def missed(*ranks: Standing) -> str:
    found = find_missed(ranks, quiet_seconds=5)
    return "" if found is None else found.text


def test_a_call_that_another_rank_has_passed_by_is_named() -> None:
    assert missed(MEETS, GONE_ON) == (
        "rank 0 waits in state_dict, which needs all ranks, and rank 1 has gone on to gather blocks.1 (forward of step "
        "4): call it on every rank; where a rank's data end before those of others, use "
        "`for batch in shardwise.join(model, loader):`"
    )
    # Within a step, no loop has ended.
    assert missed(replace(MEETS, phase="forward"), GONE_ON).endswith("call it on every rank")
    assert "rank 1 has ended" in missed(MEETS, replace(STOPPED, rank=1, left=True))
    assert "rank 1 waits in torch.distributed.barrier()" in missed(MEETS, replace(STOPPED, rank=1, in_barrier=True))


def test_a_rank_that_may_still_come_to_the_call_is_waited_for() -> None:
    assert missed(MEETS, replace(STOPPED, rank=1)) == ""
    assert missed(MEETS, replace(MEETS, rank=1)) == ""
    # It computes, or has just arrived where it is.
    assert missed(MEETS, replace(GONE_ON, idle_seconds=1)) == ""
    assert missed(replace(MEETS, idle_seconds=1), GONE_ON) == ""
    # Another group of its mesh may evaluate more batches.
    assert missed(MEETS, replace(GONE_ON, phase="evaluation")) == ""


def test_an_evaluation_that_a_rank_has_left_is_named() -> None:
    gathers = replace(WAITS, phase="evaluation", count=1, evaluated=7, together=True)
    left = replace(MEETS, rank=1, evaluated=7, meeting="a step after an evaluation")
    assert missed(gathers, left).endswith(
        "and rank 1 waits in a step after an evaluation: call it on every rank; where ranks run different numbers of "
        "them, use `with shardwise.evaluating(model):`"
    )
    assert "has ended" in missed(gathers, replace(left, meeting="", left=True))
    assert missed(replace(gathers, together=False), left) == ""
    assert missed(replace(gathers, count=0), left) == ""
