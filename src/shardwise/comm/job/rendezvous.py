"""Makes the store of a job's process group, and waits until every rank has joined."""

import errno
import socket
import threading
import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

from shardwise.base.errors import InvalidJob
from shardwise.base.torch_internals.torch_private import FileStore, HashStore, PrefixStore, Store, TCPStore
from shardwise.comm.groups.agreement import RanksMissing, about
from shardwise.comm.job.job_environment import Rendezvous

_POLL_SECONDS = 0.01
_HINT = "the output of those ranks says why"


def wait_for_ranks(rendezvous: Rendezvous, *, rank: int, num_ranks: int, limit_seconds: float) -> Store:
    """Wait until every rank has joined, and return the store for the job's process group.

    A store may outlive the ranks (torchrun keeps its store over restarts) and hold keys of earlier ones, and nodes
    may count restarts differently. So names are new in each start, and pass up and down a tree, in which each rank
    reads two others and writes for two (rank r: 2r + 1 and 2r + 2), however many ranks there are:

    up      each rank writes a name, and a new one whenever one of the two below it has another name
    down    rank 0 makes a meeting for its name; each rank passes it on to those below it, with the names that it had
            read; a rank whose own name that is joins the meeting

    The first meeting that all ranks have joined is used.
    """
    deadline = time.monotonic() + limit_seconds
    store = _store(rendezvous, num_ranks=num_ranks, limit_seconds=limit_seconds)
    place = _Place(store, rank=rank, num_ranks=num_ranks)
    while not place.is_complete():
        place.pass_on()
        if time.monotonic() > deadline:
            missing = place.missing()
            line = (
                f"rank {', '.join(map(str, missing))} of {num_ranks} did not join within {limit_seconds:g} s: {_HINT}"
            )
            raise about(RanksMissing(line), missing[0])
        time.sleep(_POLL_SECONDS)
    return PrefixStore(place.meeting, store)


class _Place:
    """A rank's place in the tree. `meeting` is the last one that it has joined."""

    def __init__(self, store: Store, *, rank: int, num_ranks: int) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._below = [other for other in (2 * rank + 1, 2 * rank + 2) if other < num_ranks]
        self._names: dict[int, str] = {}
        self._name = self.meeting = ""
        self._rename()

    def _rename(self) -> None:
        self._name = uuid4().hex
        self._store.set(f"hello/{self._rank}", self._name)

    def pass_on(self) -> None:
        """Read the names below and the meeting above, and pass on what is new."""
        names = {other: name for other in self._below if (name := self._read(f"hello/{other}"))}
        if names != self._names:
            self._names = names
            self._rename()
        if len(names) < len(self._below):
            return
        # The meeting of rank 0 has its name.
        welcome = self._read(f"welcome/{self._rank}") if self._rank else f"{self._name} {self._name}"
        name, _, meeting = welcome.partition(" ")
        if name == self._name and meeting != self.meeting:
            self.meeting = meeting
            for other in self._below:
                self._store.set(f"welcome/{other}", f"{names[other]} {meeting}")
            self._store.set(f"{meeting}/{self._rank}", "here")
            self._store.add(f"{meeting}/count", 1)

    def is_complete(self) -> bool:
        """Return whether all ranks have joined the meeting."""
        return bool(self.meeting) and int(self._store.get(f"{self.meeting}/count")) == self._num_ranks

    def missing(self) -> list[int]:
        """Return the ranks that have not come. For an error: it reads a key of each rank.

        Ranks below a missing one join nothing. Where an earlier start has left its names, those of missing ranks look
        like any other; so of such a branch only the first one is named.
        """
        everyone = range(self._num_ranks)
        silent = [other for other in everyone if not self._read(f"hello/{other}")]
        if silent:
            return silent
        meeting = self._read("hello/0")
        joined = [bool(self._read(f"{meeting}/{other}")) for other in everyone]
        return [other for other in everyone if not joined[other] and joined[(other - 1) // 2]] or [0]

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


def _store(rendezvous: Rendezvous, *, num_ranks: int, limit_seconds: float) -> Store:
    """Make the store that the rendezvous names."""
    if rendezvous.file:
        return FileStore(rendezvous.file, num_ranks)
    if not rendezvous.address:
        return HashStore()
    try:
        if not rendezvous.serves:
            return _connect(rendezvous, num_ranks=num_ranks, limit_seconds=limit_seconds)
        listening = _listen(rendezvous) if rendezvous.local else None
        return _tcp_store(rendezvous, num_ranks=num_ranks, limit_seconds=limit_seconds, listening=listening)
    except (OSError, dist.DistNetworkError) as error:
        where = _where(rendezvous)
        if rendezvous.serves:
            raise InvalidJob(f"rank 0 cannot listen on {where}: set MASTER_PORT to a port that is free") from error
        line = f"rank 0 of {num_ranks} was not at {where} within {limit_seconds:g} s: {_HINT}"
        raise about(RanksMissing(line), 0) from error


def _tcp_store(
    rendezvous: Rendezvous, *, num_ranks: int, limit_seconds: float, listening: int | None = None
) -> TCPStore:
    return TCPStore(
        rendezvous.address,
        rendezvous.port,
        num_ranks,
        is_master=rendezvous.serves,
        timeout=timedelta(seconds=limit_seconds),
        wait_for_workers=False,
        # A process that joins again still serves its first store, as long as something references it.
        multi_tenant=True,
        master_listen_fd=listening,
    )


def _connect(rendezvous: Rendezvous, *, num_ranks: int, limit_seconds: float) -> TCPStore:
    """Connect to the store that another process serves.

    torch's own time-out does not apply if something accepts the connection and never answers, and is waited for twice
    if nothing accepts it. So this connects in a thread, which is abandoned when the time is up.
    """
    outcome: list[TCPStore | BaseException] = []

    def connect() -> None:
        try:
            outcome.append(_tcp_store(rendezvous, num_ranks=num_ranks, limit_seconds=limit_seconds))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=connect, name="shardwise-connect", daemon=True)
    thread.start()
    thread.join(limit_seconds)
    found = outcome[0] if outcome else TimeoutError(f"no answer within {limit_seconds:g} s")
    if isinstance(found, TCPStore):
        return found
    if _takes_connections(rendezvous):
        raise InvalidJob(
            f"what listens on {_where(rendezvous)} did not answer as a store of rank 0 within {limit_seconds:g} s: "
            "set MASTER_PORT to a port that nothing else uses, on all ranks"
        ) from found
    raise found


def _takes_connections(rendezvous: Rendezvous) -> bool:
    try:
        socket.create_connection((rendezvous.address, rendezvous.port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _where(rendezvous: Rendezvous) -> str:
    host = f"[{rendezvous.address}]" if ":" in rendezvous.address else rendezvous.address
    return f"{host}:{rendezvous.port}"


def _listen(rendezvous: Rendezvous) -> int | None:
    """Open the socket for a store on one machine, since by default a store listens on every interface.

    Return None if the port is taken: a store that this process made earlier is then shared.
    """
    try:
        known = socket.getaddrinfo(rendezvous.address, rendezvous.port, type=socket.SOCK_STREAM)
        families = {family for family, *_ in known}
        family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
        return socket.create_server((rendezvous.address, rendezvous.port), family=family).detach()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise
