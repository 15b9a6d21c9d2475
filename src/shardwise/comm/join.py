"""Joins this process to its job: the device of the rank, and the default process group.

How it was started is told by the environment (job_environment.py); the ranks then wait for each other
(rendezvous.py). A process group that is there already is used and left alone.

    join_job   until the process ends: what `prepare` calls
    joined     for a block: what our own commands use
"""

import atexit
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from shardwise.comm.absent import absent_group
from shardwise.comm.job_environment import Start, rendezvous_of, start_of
from shardwise.comm.rendezvous import wait_for_ranks
from shardwise.errors import ShardwiseError

# How long a rank waits for the others to join, unless it is told otherwise.
LIMIT_SECONDS = 600.0


class NoDevice(ShardwiseError):  # noqa: N818
    """This rank has no GPU of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This process's place in its job."""

    rank: int
    local_rank: int
    num_ranks: int
    device: torch.device
    restarts: int


class OnError(Protocol):
    """Called with what was raised, while this rank still holds its connections."""

    def __call__(self, error: BaseException, *, rank: int) -> None: ...


def join_job(device: torch.device | None = None, *, limit_seconds: float = LIMIT_SECONDS) -> torch.device:
    """Be a rank of the job until this process ends; the device of this rank.

    With a process group that is there already, a device that is asked for is taken as it is.
    """
    if dist.is_initialized():
        if device is not None and (device.type != "cuda" or device.index is not None):
            return device
        return _device(device, start=start_of(os.environ))
    with ExitStack() as leaving:
        place = _enter(start_of(os.environ), device=device, leaving=leaving, limit_seconds=limit_seconds)
        # Only now: where any of it fails, the stack undoes the rest at once.
        atexit.register(leaving.pop_all().close)
    return place.device


@contextmanager
def joined(
    device: torch.device | None = None,
    *,
    start: Start | None = None,
    limit_seconds: float = LIMIT_SECONDS,
    silent: bool = False,
    on_error: OnError | None = None,
) -> Iterator[Place]:
    """Be a rank of the job in the block: the default process group is there, NCCL on cuda and Gloo on the CPU.

    start      replaces what the environment says
    silent     all ranks come, but the collectives of their group return at once (comm/absent.py)
    on_error   is called with an error in the block before the group is left, so that it is reported before any peer
               can complain of it; not where no launcher started this process
    """
    start = start or start_of(os.environ)
    if dist.is_initialized():
        start = replace(start, rank=dist.get_rank(), num_ranks=dist.get_world_size())
        yield _place(start, device=_device(device, start=start))
        return
    with ExitStack() as leaving, _told(on_error if start.launcher else None, rank=start.rank):
        yield _enter(start, device=device, leaving=leaving, limit_seconds=limit_seconds, silent=silent)


def _enter(
    start: Start, *, device: torch.device | None, leaving: ExitStack, limit_seconds: float, silent: bool = False
) -> Place:
    """Make the default process group; `leaving` undoes it."""
    leaving.enter_context(_loopback(start))
    device = _device(device, start=start)
    rendezvous = rendezvous_of(start, variables=os.environ)
    store = wait_for_ranks(rendezvous, rank=start.rank, num_ranks=start.num_ranks, limit_seconds=limit_seconds)
    if silent:
        leaving.enter_context(absent_group(start.num_ranks, rank=start.rank, store=store))
    else:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=start.rank, world_size=start.num_ranks)
        leaving.callback(_leave)
    return _place(start, device=device)


def _leave() -> None:
    # The user may have destroyed it already.
    if dist.is_initialized():
        dist.destroy_process_group()


def _place(start: Start, *, device: torch.device) -> Place:
    return Place(
        rank=start.rank,
        local_rank=start.local_rank,
        num_ranks=start.num_ranks,
        device=device,
        restarts=start.restarts,
    )


@contextmanager
def _told(on_error: OnError | None, *, rank: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if on_error is not None:
            on_error(error, rank=rank)
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
    asked = asked or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked.type != "cuda":
        return asked
    num_devices = torch.cuda.device_count()
    index = asked.index if asked.index is not None else _own_gpu(start, num_devices=num_devices)
    if index >= num_devices:
        raise NoDevice(
            f"rank {start.rank} would use cuda:{index}, but torch finds {num_devices} GPUs on its machine: "
            f"start at most {num_devices} ranks there, or ask for cpu"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _own_gpu(start: Start, *, num_devices: int) -> int:
    if not start.launcher:
        # The first one, unless the program has chosen another.
        return torch.cuda.current_device() if num_devices else 0
    # SLURM may show each task only the GPU that it gave to it.
    return 0 if start.launcher == "slurm" and num_devices == 1 else start.local_rank
