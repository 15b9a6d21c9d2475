"""What is said of ranks that stopped, went separate ways, or wait together."""

from collections.abc import Sequence

from shardwise.comm.autopsy.findings import DISAGREE, ENDED, NO_RECORD, STOPPED, WAITING, Finding, verdict
from shardwise.comm.autopsy.record import GroupRecord, Issued, RankRecord


def record(rank: int, names: Sequence[str], *, ended: int | None = None, first: int = 1, state: str = "") -> RankRecord:
    """A rank of three that issued these; the first `ended` of them are over (all, if not said)."""
    over = len(names) if ended is None else ended
    issued = [
        Issued(number=first + index, name=name, ended=index < over, place=f"train.py:{index}")
        for index, name in enumerate(names)
    ]
    return RankRecord(rank=rank, groups={"world": GroupRecord(ranks=(0, 1, 2), issued=issued)}, state=state)


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_a_rank_that_is_behind_stopped_and_the_others_wait_for_it() -> None:
    step = ["gather a", "reduce b", "reduce c"]
    stopped = record(1, step[:1], state="in forward of b")
    finding = only(verdict([record(0, step, ended=2), stopped, record(2, step[:2], ended=1)]))
    assert (finding.kind, finding.ranks) == (STOPPED, (1, 2))
    assert finding.text == (
        "rank 1 stopped after gather a (number 1, train.py:0) and did not come to reduce b (number 2, train.py:1); "
        "ranks 0, 2 wait for it; rank 1 was in forward of b"
    )


def test_a_member_without_a_collective_in_the_group_never_came_to_it() -> None:
    other = RankRecord(rank=2, groups={})
    finding = only(verdict([record(0, ["gather a"], ended=0), record(1, ["gather a"], ended=0), other]))
    assert (finding.kind, finding.ranks) == (STOPPED, (2,))
    assert "rank 2 stopped and did not come to gather a" in finding.text


def test_different_collectives_under_one_number_are_named_first() -> None:
    records = [record(0, ["reduce a", "reduce b"], ended=1), record(1, ["reduce b"], ended=0), record(2, ["reduce a"])]
    finding = only(verdict(records))
    assert finding.kind == DISAGREE
    assert finding.text == (
        "as number 1, ranks 0, 2 issued reduce a (number 1, train.py:0); rank 1 issued reduce b (number 1, train.py:0)"
    )


def test_a_rank_without_a_record_is_named() -> None:
    finding = only(verdict([record(0, ["gather a"], ended=0), record(2, ["gather a"], ended=0)]))
    assert (finding.kind, finding.ranks) == (NO_RECORD, (1,))
    assert "rank 1 left no record" in finding.text
    assert "ranks 0, 2 waited in gather a" in finding.text


def test_all_ranks_in_one_collective_point_at_no_rank() -> None:
    finding = only(verdict([record(rank, ["gather a"], ended=0) for rank in range(3)]))
    assert (finding.kind, finding.ranks) == (WAITING, ())
    assert "which every rank has issued" in finding.text


def test_a_job_that_was_in_no_collective_is_said_to_be() -> None:
    assert only(verdict([record(rank, ["gather a"]) for rank in range(3)])).kind == ENDED


def test_rings_that_begin_at_different_numbers_are_compared_where_they_overlap() -> None:
    finding = only(verdict([record(0, ["b", "c"], first=2), record(1, ["c"], first=3), record(2, ["a", "b", "c"])]))
    assert finding.kind == ENDED
