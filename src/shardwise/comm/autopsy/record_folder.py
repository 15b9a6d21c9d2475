"""Reads the records of a job's ranks from a folder."""

import re
from dataclasses import replace
from pathlib import Path

from shardwise.base.errors import InvalidData
from shardwise.comm.autopsy.flight_recorder import read_dump
from shardwise.comm.autopsy.own_record import PREFIX, read_record, read_restarts
from shardwise.comm.autopsy.record import RankRecord


def read_records(folder: Path) -> list[RankRecord]:
    """Read one record per rank, in rank order. A rank's own record and its flight-recorder dump are merged.

    There need be none where the folder has notes of restarts.
    """
    if not folder.is_dir():
        raise InvalidData(f"{folder} is not a folder: give the one that holds the ranks' records")
    own: dict[int, RankRecord] = {}
    dumped: dict[int, RankRecord] = {}
    for path in sorted(folder.iterdir()):
        if not re.search(r"\d(\.json|\.pickle)?$", path.name) or not path.is_file():
            continue
        is_own = path.name.startswith(PREFIX)
        record = read_record(path) if is_own else read_dump(path)
        found = own if is_own else dumped
        if record.rank in found:
            raise InvalidData(f"{folder} holds two records of rank {record.rank}: give a folder of one job")
        found[record.rank] = record
    found = dict(dumped)
    for rank, record in own.items():
        found[rank] = replace(record, groups={**found[rank].groups, **record.groups}) if rank in found else record
    if not any(record.groups or record.failed for record in found.values()) and not read_restarts(folder):
        raise InvalidData(
            f"{folder} holds no record of a collective: ranks of shardwise train leave them in its run folder when it "
            "fails, those of your own loop with SHARDWISE_AUTOPSY=DIR in their environment, and PyTorch's flight "
            "recorder with TORCH_FR_BUFFER_SIZE=2000"
        )
    return [found[rank] for rank in sorted(found)]
