"""The store over which a job's process group is made, once every rank is there."""

import errno
import json
import socket
import threading
import time
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from shardwise.comm.agreement import RanksMissing
from shardwise.comm.job_environment import Rendezvous
from shardwise.errors import InvalidJob

_POLL_SECONDS = 0.01
_HINT = "the output of those ranks says why"


def wait_for_ranks(rendezvous: Rendezvous, *, rank: int, num_ranks: int, limit_seconds: float) -> Store:
    """The store over which the job's group is made, once every rank has come to it.

    A store may outlive the ranks (torchrun's is kept over restarts), and then still holds what those before us wrote,
    while restarts are not counted alike on all nodes. So each rank says hello by a new name; rank 0 welcomes the names
    that it reads, to a new meeting whenever one of them has changed; and the meeting to which every rank has come,
    after it found its own name, is the one.
    """
    deadline = time.monotonic() + limit_seconds
    store = _store(rendezvous, num_ranks=num_ranks, limit_seconds=limit_seconds)
    everyone = range(num_ranks)
    name, meeting = uuid4().hex, ""
    welcomed: dict[str, bytes] = {}
    store.set(f"hello/{rank}", name)
    while not (meeting and store.check([f"{meeting}/{other}" for other in everyone])):
        if rank == 0:
            names = {str(other): store.get(key) for other in everyone if store.check([key := f"hello/{other}"])}
            if names != welcomed:
                welcomed = names
                told = {other: each.decode() for other, each in names.items()}
                store.set("welcome", json.dumps({"meeting": uuid4().hex, "names": told}))
        welcome = json.loads(store.get("welcome")) if store.check(["welcome"]) else {"names": {}}
        if welcome["names"].get(str(rank)) == name and welcome["meeting"] != meeting:
            meeting = welcome["meeting"]
            store.set(f"{meeting}/{rank}", "here")
        if time.monotonic() > deadline:
            missing = [other for other in everyone if not store.check([f"{meeting}/{other}"])] if meeting else [0]
            raise RanksMissing(
                f"rank {', '.join(map(str, missing))} of {num_ranks} did not join within {limit_seconds:g} s: {_HINT}"
            )
        time.sleep(_POLL_SECONDS)
    return PrefixStore(meeting, store)


def _store(rendezvous: Rendezvous, *, num_ranks: int, limit_seconds: float) -> Store:
    """The store that the rendezvous names."""
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
        raise RanksMissing(f"rank 0 of {num_ranks} was not at {where} within {limit_seconds:g} s: {_HINT}") from error


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
        # A process that joins again still serves its first store, as long as anything holds on to it.
        multi_tenant=True,
        master_listen_fd=listening,
    )


def _connect(rendezvous: Rendezvous, *, num_ranks: int, limit_seconds: float) -> TCPStore:
    """The store that another process serves.

    torch's own timeout does not hold where something takes the connection and never answers, and is waited for twice
    where nobody does. So it connects in a thread, which is left to itself when the time is up.
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
    """A socket for a store on one machine: left to itself, a store listens on every interface.

    None where the port is taken: if by an earlier store of this process, that one is shared.
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
