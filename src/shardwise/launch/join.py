"""Joins this process to its job, whoever started it.

    started by    its rank                  the ranks meet over
    our launcher  RANK, WORLD_SIZE …        a file, a new one for each start
    torchrun      RANK, WORLD_SIZE …        the agent's TCP store, at MASTER_ADDR:MASTER_PORT
    SLURM         SLURM_PROCID, …           a TCP store of rank 0 on the first node; on loopback if it is the only one
    nobody        0, in a job of one rank   memory

The variables of the environment that say so are read here and nowhere else.
"""

import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from shardwise.comm.absent import absent_group
from shardwise.comm.agreement import RanksMissing
from shardwise.errors import ShardwiseError
from shardwise.launch.failure import report

# The variable that names the file over which the ranks of one start meet.
STORE = "SHARDWISE_STORE"
_POLL_SECONDS = 0.01


class NoDevice(ShardwiseError):  # noqa: N818
    """This rank has no GPU of its own."""


class InvalidJob(ShardwiseError):  # noqa: N818
    """The variables that say how this process belongs to a job cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This process's place in its job."""

    rank: int
    local_rank: int
    num_ranks: int
    device: torch.device
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What whoever started this process said of it. `address` is where rank 0's TCP store is, if the job has one."""

    rank: int = 0
    local_rank: int = 0
    num_ranks: int = 1
    num_nodes: int = 1
    restarts: int = 0
    file: str = ""
    address: str = ""
    port: int = 0
    serves: bool = False
    by_slurm: bool = False
    hint: str = "the logs of those ranks say why"


def is_rank() -> bool:
    """Whether this process was started as one rank of a job: by our launcher, torchrun or SLURM."""
    return _by_torchrun(os.environ) or _by_slurm(os.environ)


def start_of(environment: Mapping[str, str]) -> Start:
    """How this process was started, by its environment."""
    try:
        if _by_torchrun(environment):
            return _torchrun_start(environment)
        if _by_slurm(environment):
            return _slurm_start(environment)
    except KeyError as error:
        raise InvalidJob(f"this process was started as a rank, but {error.args[0]} is not set") from None
    except ValueError as error:
        raise InvalidJob(f"this process was started as a rank, with variables that cannot be: {error}") from None
    return Start()


@contextmanager
def joined(device: torch.device | None = None, *, limit_seconds: float, silent: bool = False) -> Iterator[Place]:
    """Be a rank of the job in the block: the default process group is there, NCCL on cuda and Gloo on the CPU.

    A group that is there already is used and left alone. `silent`: all ranks come, but the collectives of their group
    return at once (comm/absent.py). An error in the block is reported before the group is left, so that it is known
    before any peer can complain of it; a process that was started as a rank then has a few seconds to end.
    """
    if dist.is_initialized():
        start = replace(start_of(os.environ), rank=dist.get_rank(), num_ranks=dist.get_world_size())
        yield _place(start, device=_device(device, start=start))
        return
    start = start_of(os.environ)
    with ExitStack() as leaving, _told(rank=start.rank):
        leaving.enter_context(_loopback(start))
        device = _device(device, start=start)
        store = meet(start, limit_seconds=limit_seconds)
        if silent:
            leaving.enter_context(absent_group(start.num_ranks, rank=start.rank, store=store))
        else:
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=start.rank, world_size=start.num_ranks)
            leaving.callback(dist.destroy_process_group)
        yield _place(start, device=device)


def _place(start: Start, *, device: torch.device) -> Place:
    return Place(
        rank=start.rank,
        local_rank=start.local_rank,
        num_ranks=start.num_ranks,
        device=device,
        restarts=start.restarts,
    )


@contextmanager
def _told(*, rank: int) -> Iterator[None]:
    """Report what is raised inside, if anybody has started this process as a rank."""
    try:
        yield
    except Exception as error:
        if is_rank():
            report(error, rank=rank)
        raise


@contextmanager
def _loopback(start: Start) -> Iterator[None]:
    """Where all ranks are on one machine, Gloo and NCCL listen on loopback only, unless told otherwise."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    ours = [name for name in names if start.num_nodes == 1 and name not in os.environ]
    os.environ.update(dict.fromkeys(ours, "lo"))
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _device(asked: torch.device | None, *, start: Start) -> torch.device:
    """The device asked for, else this rank's GPU among those of its machine, else the CPU."""
    kind = asked.type if asked is not None else ("cuda" if torch.cuda.is_available() else "cpu")
    if kind != "cuda":
        return torch.device(kind)
    num_devices = torch.cuda.device_count()
    index = asked.index if asked is not None and asked.index is not None else start.local_rank
    if start.by_slurm and num_devices == 1:
        # SLURM may show each task only the GPU that it gave to it.
        index = 0
    if index >= num_devices:
        raise NoDevice(
            f"rank {start.rank} is number {start.local_rank} on its machine, which has {num_devices} GPUs: "
            f"start at most {num_devices} ranks on it"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def meet(start: Start, *, limit_seconds: float) -> Store:
    """The store over which the job's group is made, once every rank has come to it.

    A store may outlive the ranks (torchrun's is kept over restarts), and then still holds what those before us wrote,
    while restarts are not counted alike on all nodes. So each rank says hello by a new name; rank 0 welcomes the names
    that it reads, to a new meeting whenever one of them has changed; and the meeting to which every rank has come,
    after it found its own name, is the one.
    """
    deadline = time.monotonic() + limit_seconds
    store = _store(start, limit_seconds=limit_seconds)
    everyone = range(start.num_ranks)
    name, meeting = uuid4().hex, ""
    welcomed: dict[str, bytes] = {}
    store.set(f"hello/{start.rank}", name)
    while not (meeting and store.check([f"{meeting}/{rank}" for rank in everyone])):
        if start.rank == 0:
            names = {str(rank): store.get(key) for rank in everyone if store.check([key := f"hello/{rank}"])}
            if names != welcomed:
                welcomed = names
                told = {rank: each.decode() for rank, each in names.items()}
                store.set("welcome", json.dumps({"meeting": uuid4().hex, "names": told}))
        welcome = json.loads(store.get("welcome")) if store.check(["welcome"]) else {"names": {}}
        if welcome["names"].get(str(start.rank)) == name and welcome["meeting"] != meeting:
            meeting = welcome["meeting"]
            store.set(f"{meeting}/{start.rank}", "here")
        if time.monotonic() > deadline:
            missing = [rank for rank in everyone if not store.check([f"{meeting}/{rank}"])] if meeting else [0]
            raise RanksMissing(
                f"rank {', '.join(map(str, missing))} of {start.num_ranks} did not join within {limit_seconds:g} s: "
                f"{start.hint}"
            )
        time.sleep(_POLL_SECONDS)
    return PrefixStore(meeting, store)


def _store(start: Start, *, limit_seconds: float) -> Store:
    """The store that whoever started this process has meant for it."""
    if start.file:
        return FileStore(start.file, start.num_ranks)
    if not start.address:
        return HashStore()
    where = f"{start.address}:{start.port}"
    listening = None
    try:
        if start.serves and start.num_nodes == 1:
            # A store binds to every interface, unless it is given a socket that listens already.
            listening = socket.create_server((start.address, start.port)).detach()
        return TCPStore(
            start.address,
            start.port,
            start.num_ranks,
            is_master=start.serves,
            timeout=timedelta(seconds=limit_seconds),
            wait_for_workers=False,
            master_listen_fd=listening,
        )
    except (OSError, dist.DistNetworkError) as error:
        if start.serves:
            raise InvalidJob(f"rank 0 cannot listen on {where}: set MASTER_PORT to a port that is free") from error
        raise RanksMissing(
            f"rank 0 of {start.num_ranks} was not at {where} within {limit_seconds:g} s: {start.hint}"
        ) from error


def _by_torchrun(environment: Mapping[str, str]) -> bool:
    return "RANK" in environment and "WORLD_SIZE" in environment


def _by_slurm(environment: Mapping[str, str]) -> bool:
    # One task is what a batch script has before srun: from there our own launcher starts ranks.
    return "SLURM_PROCID" in environment and environment.get("SLURM_NTASKS", "1") != "1"


def _torchrun_start(environment: Mapping[str, str]) -> Start:
    rank, file = int(environment["RANK"]), environment.get(STORE, "")
    return Start(
        rank=rank,
        local_rank=int(environment.get("LOCAL_RANK", rank)),
        num_ranks=int(environment["WORLD_SIZE"]),
        num_nodes=int(environment.get("GROUP_WORLD_SIZE", "0")),
        restarts=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        file=file,
        address="" if file else environment["MASTER_ADDR"],
        port=0 if file else int(environment["MASTER_PORT"]),
        # Else the agent serves the store.
        serves=rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )


def _slurm_start(environment: Mapping[str, str]) -> Start:
    rank, num_nodes = int(environment["SLURM_PROCID"]), int(environment.get("SLURM_NNODES", "0"))
    # Jobs that share a node must not share a port; below 32768 the kernel hands out none by itself.
    job, step = int(environment.get("SLURM_JOB_ID", "0")), int(environment.get("SLURM_STEP_ID", "0"))
    port = 15000 + (job + 131 * step) % 16000
    in_step = "SLURM_STEP_ID" in environment
    return Start(
        rank=rank,
        local_rank=int(environment.get("SLURM_LOCALID", "0")),
        num_ranks=int(environment["SLURM_NTASKS"]),
        num_nodes=num_nodes,
        restarts=int(environment.get("SLURM_RESTART_COUNT", "0")),
        address=environment.get("MASTER_ADDR") or ("127.0.0.1" if num_nodes == 1 else _first_node(environment)),
        port=int(environment.get("MASTER_PORT", port)),
        serves=rank == 0,
        by_slurm=True,
        hint="their output says why" if in_step else "start the ranks with srun",
    )


def _first_node(environment: Mapping[str, str]) -> str:
    """The host of rank 0: of `a[01-04,07],b2` it is a01."""
    keys = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next((environment[key] for key in keys if key in environment), "")
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if first is None:
        return environment["SLURM_LAUNCH_NODE_IPADDR"]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])
