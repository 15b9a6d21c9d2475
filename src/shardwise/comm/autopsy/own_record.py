"""Writes and reads a rank's own record: a small JSON file that it leaves in a folder when its job fails.

Ranks that are started again leave none; the launcher adds a line about each restart to another file of the folder.
"""

import json
import os
from dataclasses import asdict
from pathlib import Path
from reprlib import repr as show

from shardwise.base.errors import InvalidData
from shardwise.base.files.atomic import atomic_write
from shardwise.base.files.data_file import UnreadableFile, open_to_append, parse_json, read_content, read_json
from shardwise.base.files.form import WrongForm, anything, table
from shardwise.base.files.keys import object_of
from shardwise.comm.autopsy.record import RankRecord

PREFIX = "autopsy-rank-"
_RESTARTS = "autopsy-restarts.jsonl"
_FORMAT = 1
# The collectives of two steps; a step of 10,000 units takes about 4 MiB.
_MOST_BYTES = 1 << 26


def path_of(folder: Path, *, rank: int) -> Path:
    return folder / f"{PREFIX}{rank}.json"


def write_record(folder: Path, record: RankRecord) -> None:
    """Write a rank's record atomically, replacing an earlier one."""
    with atomic_write(path_of(folder, rank=record.rank)) as file:
        file.write(json.dumps({"shardwise": _FORMAT, **asdict(record)}).encode())


def note_restart(folder: Path, *, rank: int, text: str) -> None:
    """Note which rank failed first, and how, before all ranks are started again."""
    with os.fdopen(open_to_append(folder / _RESTARTS), "a") as file:
        file.write(json.dumps({"rank": rank, "text": text}) + "\n")


def read_restarts(folder: Path) -> list[tuple[int, str]]:
    """Return (rank, how it failed) of each restart of the last job in this folder, the first one first."""
    path = folder / _RESTARTS
    if not path.exists():
        return []
    try:
        lines = [parse_json(line) for line in read_content(path, most_bytes=_MOST_BYTES).splitlines()]
        return [(int(line["rank"]), str(line["text"])) for line in lines]
    except (UnreadableFile, KeyError, TypeError, ValueError) as error:
        raise InvalidData(f"{path} is not a list of restarts: {' '.join(str(error).split())[:200]}") from error


def clear_restarts(folder: Path) -> None:
    """Remove the notes of an earlier job."""
    (folder / _RESTARTS).unlink(missing_ok=True)


def clear_records(folder: Path) -> None:
    """Remove the records of an earlier start."""
    for path in folder.glob(f"{PREFIX}*.json"):
        if not path.is_dir():
            path.unlink(missing_ok=True)


def read_record(path: Path) -> RankRecord:
    try:
        found = table(anything)(read_json(path, most_bytes=_MOST_BYTES), "")
        written = found.pop("shardwise", None)
        if written != _FORMAT:
            raise WrongForm(f"it is of format {show(written)}, and this Shardwise reads {_FORMAT}")
        record: RankRecord = object_of(RankRecord)(found, "")
    except (UnreadableFile, WrongForm) as error:
        raise InvalidData(f"{path} is not a record of a rank: {' '.join(str(error).split())[:200]}") from error
    return record
