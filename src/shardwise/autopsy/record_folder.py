"""The records of a job's ranks, found in a folder."""

import re
from pathlib import Path

from shardwise.autopsy.flight_recorder import read_dump
from shardwise.autopsy.record import RankRecord
from shardwise.errors import InvalidData


def read_records(folder: Path) -> list[RankRecord]:
    """One per rank, in rank order."""
    if not folder.is_dir():
        raise InvalidData(f"{folder} is not a folder: give the one that holds the ranks' records")
    found: dict[int, RankRecord] = {}
    for path in sorted(folder.iterdir()):
        if not re.search(r"\d(\.json|\.pickle)?$", path.name) or not path.is_file():
            continue
        record = read_dump(path)
        if record.rank in found:
            raise InvalidData(f"{folder} holds two records of rank {record.rank}: give a folder of one job")
        found[record.rank] = record
    if not any(record.groups for record in found.values()):
        raise InvalidData(
            f"{folder} holds no record of a collective: a job writes them when it hangs, and PyTorch's flight recorder "
            "does with TORCH_FR_BUFFER_SIZE=2000 in its environment"
        )
    return [found[rank] for rank in sorted(found)]
