"""Joins this process to its job: chooses the rank's device and makes the default process group.

The environment says how the process was started (job_environment.py); the ranks then wait for each other
(rendezvous.py). A process group that exists already is used and not changed.

    join_job   until the process ends; called by `prepare`
    joined     for a block; used by our own commands
"""

import atexit
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from shardwise.base.errors import ShardwiseError
from shardwise.comm.job.absent import absent_group
from shardwise.comm.job.job_environment import Start, rendezvous_of, start_of, why_alone
from shardwise.comm.job.rendezvous import wait_for_ranks

# How long a rank waits by default for the others to join.
LIMIT_SECONDS = 600.0


class NoDevice(ShardwiseError):  # noqa: N818
    """This rank has no GPU of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This process's place in its job."""

    rank: int
    num_ranks: int
    device: torch.device
    restarts: int


class OnError(Protocol):
    """Called with an error while this rank still holds its connections."""

    def __call__(self, error: BaseException, *, rank: int) -> None: ...


def join_job(device: torch.device | None = None, *, limit_seconds: float = LIMIT_SECONDS) -> torch.device:
    """Join the job until this process ends, and return the device of this rank.

    If a process group exists already, a `device` that is given is returned unchanged.
    """
    if dist.is_initialized():
        if device is not None and (device.type != "cuda" or device.index is not None):
            return device
        return _device(device, start=start_of(os.environ))
    with ExitStack() as leaving:
        place = _enter(start_of(os.environ), device=device, leaving=leaving, limit_seconds=limit_seconds)
        # Only after success: if any of it fails, the stack undoes the rest at once.
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
    """Join the job for the block, with a default process group: NCCL on cuda, Gloo on the CPU.

    start      replaces what the environment says
    silent     all ranks join, but the collectives of their group return at once (absent.py)
    on_error   is called with an error in the block before the group is left, so that it is reported before any peer's
               error about it; not called if no launcher started this process
    """
    start = start or start_of(os.environ)
    if dist.is_initialized():
        start = replace(start, rank=dist.get_rank(), num_ranks=dist.get_world_size())
        yield _place(start, device=_device(device, start=start))
        return
    with ExitStack() as leaving:
        try:
            yield _enter(start, device=device, leaving=leaving, limit_seconds=limit_seconds, silent=silent)
        except Exception as error:
            if on_error is not None and start.launcher:
                on_error(error, rank=start.rank)
            raise


def _enter(
    start: Start, *, device: torch.device | None, leaving: ExitStack, limit_seconds: float, silent: bool = False
) -> Place:
    """Make the default process group; closing `leaving` undoes it."""
    alone = why_alone(os.environ) if start.num_ranks == 1 else None
    if alone is not None:
        warnings.warn(alone, stacklevel=2)
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
    return Place(rank=start.rank, num_ranks=start.num_ranks, device=device, restarts=start.restarts)


@contextmanager
def _loopback(start: Start) -> Iterator[None]:
    """Make Gloo and NCCL listen on loopback only if all ranks are on one machine and no variable says otherwise."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    ours = [name for name in names if start.num_nodes == 1 and name not in os.environ]
    os.environ.update(dict.fromkeys(ours, "lo"))
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _device(asked: torch.device | None, *, start: Start) -> torch.device:
    """Return the device that was asked for, else this rank's GPU, else the CPU."""
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
        # GPU 0, unless the program has chosen another.
        return torch.cuda.current_device() if num_devices else 0
    # SLURM may show each task only its own GPU.
    return 0 if start.launcher == "slurm" and num_devices == 1 else start.local_rank
