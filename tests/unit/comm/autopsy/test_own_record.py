"""Records that our own ranks leave: written whole, read as plain values, and aligned with the step program."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import InvalidData
from shardwise.comm.autopsy.findings import DISAGREE, FAILED, NO_RECORD, following, replaced, verdict
from shardwise.comm.autopsy.own_record import (
    clear_records,
    clear_restarts,
    note_restart,
    path_of,
    read_record,
    read_restarts,
    write_record,
)
from shardwise.comm.autopsy.record import GroupRecord, Issued, RankRecord
from shardwise.comm.autopsy.record_folder import read_records

PROGRAM = ("gather a", "gather b", "reduce b", "reduce a")


def record(rank: int, *names: str, **more: Any) -> RankRecord:
    issued = tuple(
        Issued(number=5 + place, name=f"{name} of 8 elements", ended=True) for place, name in enumerate(names)
    )
    return RankRecord(
        rank=rank, groups={"reduce": GroupRecord(ranks=(0, 1), issued=issued)}, program={"reduce": PROGRAM}, **more
    )


def test_a_record_is_read_as_it_was_written_and_replaced_by_the_next(tmp_path: Path) -> None:
    first, second = record(3, "gather a"), record(3, "gather a", "gather b", state="at step 2", heard={1: "step 1"})
    for one in (first, second):
        write_record(tmp_path, one)
    assert read_record(path_of(tmp_path, rank=3)) == second
    assert [path.name for path in tmp_path.iterdir()] == ["autopsy-rank-3.json"]
    clear_records(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"shardwise": 2}',
        b'{"shardwise": 1}',
        b'{"shardwise": 1, "rank": 0, "groups": [], "state": "", "failed": "", "heard": {}, "program": {}}',
        b'{"shardwise": 1, "rank": "x", "groups": {}, "state": "", "failed": "", "heard": {}, "program": {}}',
        b'{"shardwise": 1, "rank": 0, "groups": {"a": {"ranks": [0], "issued": []}}, "state": "", "failed": "", '
        b'"heard": {}, "program": {}}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_record_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    path = path_of(tmp_path, rank=0)
    path.write_bytes(content)
    with pytest.raises(InvalidData, match=r"autopsy-rank-0\.json is not a record of a rank") as refused:
        read_records(tmp_path)
    assert "\n" not in str(refused.value)


def test_restarts_are_told_until_the_next_job_and_a_damaged_list_is_one_line(tmp_path: Path) -> None:
    for number in (1, 2):
        note_restart(tmp_path, rank=number, text=f"rank {number} failed")
    assert read_restarts(tmp_path) == [(1, "rank 1 failed"), (2, "rank 2 failed")]
    assert read_records(tmp_path) == []
    assert [finding.ranks for finding in replaced(read_restarts(tmp_path))] == [(1,), (2,)]
    (tmp_path / "autopsy-restarts.jsonl").write_text("{}\n")
    with pytest.raises(InvalidData, match="is not a list of restarts"):
        read_restarts(tmp_path)
    clear_restarts(tmp_path)
    with pytest.raises(InvalidData, match="holds no record of a collective"):
        read_records(tmp_path)


def test_a_rank_may_leave_a_record_and_a_dump_of_the_flight_recorder(tmp_path: Path) -> None:
    write_record(tmp_path, record(0, "gather a", state="at step 2"))
    entry = {
        "process_group": ["0", "default_pg"],
        "collective_seq_id": 1,
        "profiling_name": "nccl:all_reduce",
        "state": "completed",
    }
    for rank in (0, 1):
        (tmp_path / f"nccl_trace_rank_{rank}.json").write_text(json.dumps({"entries": [entry]}))
    both, dumped = read_records(tmp_path)
    assert (list(both.groups), both.state) == (["default_pg", "reduce"], "at step 2")
    assert list(dumped.groups) == ["default_pg"]


def test_the_rank_that_failed_comes_first_and_its_peers_error_is_none() -> None:
    failed = record(1, "gather a", failed="ValueError: no", state="at step 3, forward")
    first, *_ = verdict([record(0, "gather a", "gather b"), failed])
    assert (first.kind, first.ranks, first.text) == (FAILED, (1,), "rank 1 failed (ValueError: no): at step 3, forward")


def test_a_difference_is_told_with_what_the_program_has_there() -> None:
    first, *_ = verdict([record(0, *PROGRAM), record(1, "gather a", "gather b", "reduce a")])
    assert first.kind == DISAGREE
    assert first.text.startswith("as number 7, rank 0 issued reduce b of 8 elements")
    assert first.text.endswith("; the step program has reduce b there")


def test_a_rank_without_a_record_is_told_with_where_it_was_last_heard() -> None:
    first, *_ = verdict([record(0, "gather a", heard={1: "step 4, forward, after gather a"})])
    assert (first.kind, first.ranks) == (NO_RECORD, (1,))
    assert "; rank 1 was last heard at step 4, forward, after gather a" in first.text


@pytest.mark.parametrize(
    ("issued", "expected"),
    [
        (["gather a"], "gather b"),
        # A new step begins where the last one ended.
        (["reduce b", "reduce a"], "gather a"),
        # A unit of two dtypes issues two collectives of one name.
        (["gather a", "gather b", "gather b"], "reduce b"),
        (["something else"], ""),
        ([], ""),
    ],
)
def test_what_follows_in_a_program_is_found_by_what_was_issued_before(issued: list[str], expected: str) -> None:
    assert following([f"{name} of 8 elements" for name in issued], program=PROGRAM) == expected


def test_of_two_places_the_one_with_the_same_past_is_taken() -> None:
    program = ("gather a", "gather b", "reduce b", "gather a", "reduce a")
    assert following(["reduce b of 8 elements", "gather a of 8 elements"], program=program) == "reduce a"
    assert following(["reduce a of 8 elements", "gather a of 8 elements"], program=program) == "gather b"
