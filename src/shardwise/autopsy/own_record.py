"""Writes and reads a rank's own record: a small JSON file that it leaves in a folder when its job fails."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwise.autopsy.record import GroupRecord, Issued, RankRecord
from shardwise.errors import InvalidData
from shardwise.files.atomic import atomic_write
from shardwise.files.regular_file import read_at_most

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
        found = json.loads(read_at_most(path, _MOST_BYTES))
        if found["shardwise"] != _FORMAT:
            raise ValueError(f"it is of format {found['shardwise']}, and this Shardwise reads {_FORMAT}")
        return RankRecord(
            rank=int(found["rank"]),
            groups={str(name): _group(group) for name, group in found["groups"].items()},
            state=str(found["state"]),
            failed=str(found["failed"]),
            heard={int(rank): str(standing) for rank, standing in found["heard"].items()},
            program={str(name): tuple(map(str, names)) for name, names in found["program"].items()},
        )
    except OSError as error:
        raise InvalidData(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidData(f"{path} is not a record of a rank: {' '.join(str(error).split())[:200]}") from error


def _group(found: Mapping[str, Any]) -> GroupRecord:
    issued = [
        Issued(number=int(one["number"]), name=str(one["name"]), ended=bool(one["ended"]), place=str(one["place"]))
        for one in found["issued"]
    ]
    if not issued:
        raise ValueError("a group without a collective")
    return GroupRecord(ranks=tuple(map(int, found["ranks"])), issued=issued)
