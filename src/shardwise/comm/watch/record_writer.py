"""Writes a record of what a rank issued last when its job fails, for `shardwise autopsy`.

The record goes into the run folder of `shardwise train`, or into the folder that SHARDWISE_AUTOPSY names; without
either, nothing is written. A rank writes it when an error ends it, when a collective fails (a peer is gone), and when
the watchdog ends it.
"""

import os
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.base.vocabulary.while_alive import WhileAlive, replaced
from shardwise.comm.autopsy.own_record import write_record
from shardwise.comm.autopsy.record import GroupRecord, Issued, RankRecord
from shardwise.comm.groups.agreement import RanksDisagree, RanksMissing
from shardwise.comm.groups.groups import MeshGroups
from shardwise.comm.groups.rank_progress import PROGRESS
from shardwise.comm.job.job_environment import autopsy_folder

User = TypeVar("User")


@dataclass(frozen=True, slots=True, kw_only=True)
class LastIssued:
    """The last collectives of one model.

    issued     group → (number in the group, name) of the last collectives
    program    group → the collectives of a step, in the order of the step program
    upcoming   the operations of the next row of the program
    """

    issued: Mapping[str, list[tuple[int, str]]]
    program: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    upcoming: tuple[str, ...] = ()


class RecordWriter:
    """The writer of this process, which is one rank of one job."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._users: weakref.WeakKeyDictionary[Any, tuple[MeshGroups, Callable[[Any], LastIssued]]]
        self._users = weakref.WeakKeyDictionary()
        self._reporting: WhileAlive[Any] = WhileAlive(replaced(sys, "excepthook", self._write_first))

    def describe(self, user: User, *, groups: MeshGroups, last: Callable[[User], LastIssued]) -> None:
        """Include what was issued for `user` in records, as long as it exists."""
        self._users[user] = (groups, last)
        self.folder = self.folder or autopsy_folder()
        PROGRESS.leave_record = self.write
        if self.folder is not None:
            self._reporting.add(user)

    def _write_first(
        self, before: Callable[..., None], kind: type[BaseException], error: BaseException, trace: Any
    ) -> None:
        """Write a record when an error that nothing catches ends this process."""
        self.write(error)
        before(kind, error, trace)

    def write(self, error: BaseException | None, *, heard: Mapping[int, str] | None = None) -> None:
        """Write what this rank has issued, why it ends (None: it waits for others), and where others stood."""
        if self.folder is None or not self._users or not dist.is_initialized():
            return
        try:
            write_record(self.folder, self._record(error, heard=heard or {}))
        except OSError as failed:
            # A full disk may be what ended the job. Not through Python's buffers: another thread may hold their locks.
            os.write(2, f"shardwise: no record was left in {self.folder}: {failed.strerror}\n".encode())

    def _record(self, error: BaseException | None, *, heard: Mapping[int, str]) -> RankRecord:
        rank = dist.get_rank()
        # Ranks that disagree, or a collective that failed, are about a peer.
        is_echo = isinstance(error, RanksDisagree | RanksMissing | dist.DistError) or PROGRESS.lost_in != ""
        groups: dict[str, GroupRecord] = {}
        program: dict[str, tuple[str, ...]] = {}
        upcoming: tuple[str, ...] = ()
        for user, (mesh, last) in list(self._users.items()):
            found = last(user)
            upcoming = upcoming or found.upcoming
            for name, group in mesh.by_name().items():
                ranks = ", ".join(map(str, group.ranks))
                label = name if group.size == dist.get_world_size() else f"{name} of ranks {ranks}"
                if found.issued.get(name):
                    groups[label] = GroupRecord(ranks=group.ranks, issued=_marked(found.issued[name]))
                program[label] = found.program.get(name, ())
        return RankRecord(
            rank=rank,
            groups=groups,
            state=_state(rank, upcoming),
            failed=f"{type(error).__name__}: {error}"[:1000] if error is not None and not is_echo else "",
            heard=dict(heard),
            program=program,
        )


RECORDS = RecordWriter()


def _state(rank: int, upcoming: tuple[str, ...]) -> str:
    """Describe where this rank stands, and what comes next in its program."""
    waits = f", waiting in {PROGRESS.waits_for}" if PROGRESS.waits_for else ""
    follows = f"; next in its step program: {', '.join(upcoming)}" if upcoming else ""
    return f"at {PROGRESS.standing(rank, idle_seconds=0.0)}{waits}{follows}"


def _marked(issued: list[tuple[int, str]]) -> list[Issued]:
    """Mark as not ended the collective that this process waits for, and all that it issued in the group after it."""
    waits_for = PROGRESS.waits_for or PROGRESS.lost_in
    places = [place for place, (_, name) in enumerate(issued) if waits_for and name.startswith(f"{waits_for} of ")]
    num_ended = places[-1] if places else len(issued)
    return [Issued(number=number, name=name, ended=place < num_ended) for place, (number, name) in enumerate(issued)]
