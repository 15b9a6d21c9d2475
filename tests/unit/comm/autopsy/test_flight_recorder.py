"""Dumps of PyTorch's flight recorder are read as plain values; nothing in them runs."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from shardwise.base.errors import InvalidData
from shardwise.comm.autopsy.flight_recorder import read_dump
from shardwise.comm.autopsy.record_folder import read_records
from shardwise.doors.cli.app import main


def entry(number: int, **fields: Any) -> dict[str, Any]:
    frames = [
        {"name": "all_reduce", "filename": "/lib/torch/distributed/distributed_c10d.py", "line": 9},
        {"name": "step", "filename": "/home/me/train.py", "line": 31},
    ]
    return {
        "frames": frames,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4, 2]],
        "input_dtypes": ["Float"],
        "state": "completed",
        "is_p2p": False,
        **fields,
    }


def dump(*entries: dict[str, Any]) -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"version": "2.10", "pg_config": config, "entries": list(entries)}


def write(folder: Path, *, ranks: dict[int, Any]) -> None:
    for rank, content in ranks.items():
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(content))


def test_a_dump_names_the_operation_its_sizes_and_the_users_line(tmp_path: Path) -> None:
    write(tmp_path, ranks={3: dump(entry(1), entry(2, state="started"), entry(7, is_p2p=True))})
    record = read_dump(tmp_path / "nccl_trace_rank_3")
    group = record.groups["default_pg"]
    assert (record.rank, group.ranks) == (3, (0, 1))
    assert [(one.number, one.name, one.ended, one.place) for one in group.issued] == [
        (1, "all_reduce 4 × 2 Float", True, "train.py:31 in step"),
        (2, "all_reduce 4 × 2 Float", False, "train.py:31 in step"),
    ]


def test_a_dump_in_json_is_read_as_well(tmp_path: Path) -> None:
    (tmp_path / "trace_0.json").write_text(json.dumps(dump(entry(1, retired=True, state="scheduled"))))
    assert read_dump(tmp_path / "trace_0.json").groups["default_pg"].issued[0].ended


class Runs:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04",
        b"{",
        b'{"entries":' * 100_000,
        pickle.dumps([1]),
        pickle.dumps({"entries": 3}),
        pickle.dumps({"entries": [3]}),
        pickle.dumps({"entries": [{"process_group": None}]}),
        pickle.dumps({"entries": [{**entry(1), "collective_seq_id": "x"}]}),
        pickle.dumps({"entries": [{**entry(1), "frames": [3]}]}),
        pickle.dumps(dump(entry(1)) | {"pg_config": [1]}),
        pickle.dumps({"entries": Runs()}),
    ],
)
def test_what_is_not_a_dump_is_one_line_and_runs_nothing(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nccl_trace_rank_0").write_bytes(content)
    with pytest.raises(InvalidData, match="nccl_trace_rank_0"):
        read_dump(tmp_path / "nccl_trace_rank_0")
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_records_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="TORCH_FR_BUFFER_SIZE"):
        read_records(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(InvalidData, match="TORCH_FR_BUFFER_SIZE"):
        read_records(tmp_path)
    with pytest.raises(InvalidData, match="not a folder"):
        read_records(tmp_path / "notes.txt")


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 0


def test_the_command_says_who_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, ranks={0: dump(entry(1), entry(2, state="started")), 1: dump(entry(1))})
    run("autopsy", str(tmp_path))
    assert "rank 1 stopped after all_reduce 4 × 2 Float (number 1, train.py:31 in step)" in capsys.readouterr().out
    run("autopsy", str(tmp_path), "--json")
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["kind"], finding["ranks"]) == ("stopped", [1])


def _multiplied() -> list[Any]:
    value: list[Any] = [1] * 100
    for _ in range(6):
        value = [value] * 100
    return value


_HEAD = b"\x80\x05"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("content", "line"),
    [
        # A bytearray of 2**50 bytes, and a value that is stored under the number 2**32 - 1.
        (_HEAD + b"\x96" + (2**50).to_bytes(8, "little") + b".", "has the instruction|expected"),
        (_HEAD + b"]r\xff\xff\xff\xff.", "a value under a number of none"),
        (_HEAD + b"\x8d" + (2**62).to_bytes(8, "little") + b".", "expected"),
        (_HEAD + b"]" * 50_000_000 + b".", "stores more than 5,000,000 values"),
        (pickle.dumps(dump(entry(1, input_sizes=_multiplied()))), "stands for more than 5,000,000 values"),
        (b'{"entries": [' + b"[" * 100_000 + b"]" * 100_000 + b"]}", "nested too deeply"),
        (b'{"entries": [{"collective_seq_id": Infinity}]}', "must be finite"),
    ],
)
def test_lengths_and_nesting_that_a_dump_only_claims_are_refused(tmp_path: Path, content: bytes, line: str) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(content)
    with pytest.raises(InvalidData, match=rf"nccl_trace_rank_0 is not a dump of PyTorch's flight recorder: .*{line}"):
        read_dump(path)


def test_lists_that_are_nested_in_a_pickle_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    # Python's own writer of pickles is recursive.
    deep = b"]" * 500_000 + b"a" * 499_999
    path.write_bytes(_HEAD + b"}\x8c\x07entries]" + deep + b"as.")
    with pytest.raises(InvalidData, match="nested too deeply: more than 100 levels"):
        read_dump(path)
