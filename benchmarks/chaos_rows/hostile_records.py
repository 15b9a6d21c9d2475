"""What row 16 tries of `shardwise autopsy`: records and dumps made by somebody who means harm."""

import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

from chaos_rows.hostile_objects import BIG, Case, Command, Payload, fifo, link, sparse

from shardwise.autopsy.own_record import path_of, write_record
from shardwise.autopsy.record import GroupRecord, Issued, RankRecord

DUMP = "nccl_trace_rank_0"


def record(**changes: object) -> RankRecord:
    issued = [Issued(number=1, name="\x1b[2J[red]gather a", ended=False)]
    fields = {"rank": 0, "groups": {"world": GroupRecord(ranks=(0, BIG), issued=issued)}, "state": "\x1b]0;x\x07"}
    return RankRecord(**{**fields, **changes})


def folder_with(name: str, make: Callable[[Path], object]) -> Case:
    def case(folder: Path) -> list[Command]:
        make(folder / name)
        return [("autopsy", str(folder)), ("autopsy", str(folder), "--json")]

    return case


def own(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def records() -> dict[str, Case]:
    name = path_of(Path(), rank=0).name
    return {
        "record: a huge file": folder_with(name, sparse),
        "record: a FIFO": folder_with(name, fifo),
        "record: /dev/zero": folder_with(name, partial(link, to="/dev/zero")),
        "record: deep": folder_with(name, own(b'{"a":' * 200_000)),
        "record: not JSON": folder_with(name, own(b"\xff\xfe")),
        "record: a large number": folder_with(name, own(b'{"shardwise": 1, "rank": ' + b"9" * 100_000 + b"}")),
        "record: no numbers": folder_with(name, own(json.dumps({"shardwise": 1, "rank": None}).encode())),
        "record: control characters": folder_with(name, lambda path: write_record(path.parent, record())),
        "record: a rank below 0": folder_with(name, lambda path: write_record(path.parent, record(rank=-1))),
        "dump: code": folder_with(
            DUMP, lambda path: path.write_bytes(pickle.dumps(Payload(path.parent.parent / "ran")))
        ),
        "dump: a huge file": folder_with(DUMP, sparse),
        "dump: deep": folder_with(f"{DUMP}.json", own(b'{"entries":' * 200_000)),
    }
