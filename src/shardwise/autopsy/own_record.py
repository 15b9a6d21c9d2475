"""Writes and reads a rank's own record: a small JSON file that it leaves in a folder when its job fails."""

import json
from dataclasses import asdict
from pathlib import Path
from reprlib import repr as show

from shardwise.autopsy.record import RankRecord
from shardwise.errors import InvalidData
from shardwise.files.atomic import atomic_write
from shardwise.files.data_file import UnreadableFile, read_json
from shardwise.files.form import WrongForm, anything, table
from shardwise.files.keys import object_of

PREFIX = "autopsy-rank-"
_FORMAT = 1
# The collectives of two steps; a step of 10,000 units takes about 4 MiB.
_MOST_BYTES = 1 << 26


def path_of(folder: Path, *, rank: int) -> Path:
    return folder / f"{PREFIX}{rank}.json"


def write_record(folder: Path, record: RankRecord) -> None:
    """Write a rank's record atomically, replacing an earlier one."""
    with atomic_write(path_of(folder, rank=record.rank)) as file:
        file.write(json.dumps({"shardwise": _FORMAT, **asdict(record)}).encode())


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
