"""Makes the store of a job's process group, and waits until every rank has joined."""

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
    """Wait until every rank has joined, and return the store for the job's process group.

    A store may outlive the ranks (torchrun keeps its store over restarts) and hold keys of earlier ones, and nodes
    may count restarts differently. So each rank writes a new name under `hello`. Rank 0 publishes the names that it
    reads, with a new meeting whenever one changes. A rank that finds its own name joins that meeting, and the first
    meeting that all ranks have joined is used.
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
                decoded = {other: each.decode() for other, each in names.items()}
                store.set("welcome", json.dumps({"meeting": uuid4().hex, "names": decoded}))
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
