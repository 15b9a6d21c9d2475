"""What a rank leaves behind when its job fails, for `shardwise autopsy`: a record of what it issued last.

It goes into the run folder of `shardwise train`, or into the folder that SHARDWISE_AUTOPSY names; without either,
nothing is written. A rank writes it when an error ends it, when a collective fails (a peer is gone), and when the
watchdog ends it.
"""

import os
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.autopsy.own_record import write_record
from shardwise.autopsy.record import GroupRecord, Issued, RankRecord
from shardwise.comm.agreement import RanksDisagree, RanksMissing
from shardwise.comm.groups import MeshGroups
from shardwise.comm.job_environment import autopsy_folder
from shardwise.comm.rank_progress import PROGRESS

User = TypeVar("User")


@dataclass(frozen=True, slots=True, kw_only=True)
class LastIssued:
    """Of one model.

    issued     by group: (number among all of the group, name) of the last collectives
    program    by group: the collectives of a step, in the order of its program
    upcoming   the operations of the row of the program that comes next
    """

    issued: Mapping[str, list[tuple[int, str]]]
    program: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    upcoming: tuple[str, ...] = ()


class RecordWriter:
    """A process is one rank of one job, so there is one of them."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._users: weakref.WeakKeyDictionary[Any, tuple[MeshGroups, Callable[[Any], LastIssued]]]
        self._users = weakref.WeakKeyDictionary()
        self._hooked = False

    def tell_of(self, user: User, *, groups: MeshGroups, last: Callable[[User], LastIssued]) -> None:
        """From now on, and as long as `user` exists, records tell what was issued for it."""
        self._users[user] = (groups, last)
        self.folder = self.folder or autopsy_folder()
        PROGRESS.leave_record = self.write
        if self.folder is not None and not self._hooked:
            self._hooked = True
            before = sys.excepthook

            def write_first(kind: type[BaseException], error: BaseException, trace: Any) -> None:
                self.write(error)
                before(kind, error, trace)

            sys.excepthook = write_first

    def write(self, error: BaseException | None, *, heard: Mapping[int, str] | None = None) -> None:
        """What this rank has issued; `error`: why it ends, None if others hold it up. `heard`: where others stood."""
        if self.folder is None or not self._users or not dist.is_initialized():
            return
        try:
            write_record(self.folder, self._record(error, heard=heard or {}))
        except OSError as failed:
            # The disk may be what ended the job. Past Python's buffers: another thread may hold their locks.
            os.write(2, f"shardwise: no record was left in {self.folder}: {failed.strerror}\n".encode())

    def _record(self, error: BaseException | None, *, heard: Mapping[int, str]) -> RankRecord:
        rank = dist.get_rank()
        own = error is not None and not _tells_of_a_peer(error)
        groups: dict[str, GroupRecord] = {}
        program: dict[str, tuple[str, ...]] = {}
        upcoming: tuple[str, ...] = ()
        for user, (mesh, last) in list(self._users.items()):
            told = last(user)
            upcoming = upcoming or told.upcoming
            for name, group in mesh.by_name().items():
                shown = name if group.size == dist.get_world_size() else f"{name} of ranks {_listed(group.ranks)}"
                if told.issued.get(name):
                    groups[shown] = GroupRecord(ranks=group.ranks, issued=_marked(told.issued[name]))
                program[shown] = told.program.get(name, ())
        return RankRecord(
            rank=rank,
            groups=groups,
            state=_state(rank, upcoming),
            failed=f"{type(error).__name__}: {error}"[:1000] if own else "",
            heard=dict(heard),
            program=program,
        )


RECORDS = RecordWriter()


def _state(rank: int, upcoming: tuple[str, ...]) -> str:
    """Where this rank stands, and what its program says next."""
    waits = f", waiting in {PROGRESS.waits_for}" if PROGRESS.waits_for else ""
    follows = f"; next in its step program: {', '.join(upcoming)}" if upcoming else ""
    return f"at {PROGRESS.standing(rank, idle_seconds=0.0)}{waits}{follows}"


def _marked(issued: list[tuple[int, str]]) -> list[Issued]:
    """The collective in whose wait this process is, and all that it issued in that group since, are not over."""
    waits_for = PROGRESS.waits_for or PROGRESS.lost_in
    places = [place for place, (_, name) in enumerate(issued) if waits_for and name.startswith(f"{waits_for} of ")]
    over = places[-1] if places else len(issued)
    return [Issued(number=number, name=name, ended=place < over) for place, (number, name) in enumerate(issued)]


def _tells_of_a_peer(error: BaseException) -> bool:
    """Whether the error is not this rank's own: ranks that went separate ways, or a collective that failed."""
    return isinstance(error, RanksDisagree | RanksMissing | dist.DistError) or PROGRESS.lost_in != ""


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
