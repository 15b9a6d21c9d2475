"""Measures several ranks of this machine at once, each on its own device, and their collectives."""

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.base.errors import ShardwiseError
from shardwise.base.files.data_file import read_json
from shardwise.hardware.measuring.calibrate import Progress, measure_device
from shardwise.hardware.measuring.measure import synchronize

_NUM_TIMINGS = 5
_LARGEST_BYTES = {"cuda": 2**28, "cpu": 2**24}
_LIMIT_SECONDS = 280.0

# torch 2.13 renamed them and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RankFailed(ShardwiseError):  # noqa: N818 - reads as the first word of the line that users see
    """A measuring rank ended with an error, or not in time."""


def measure_ranks(
    device_type: str, *, num_ranks: int, limit_seconds: float, progress: Progress = lambda done, total: None
) -> dict[str, Any]:
    """Return the measurements of rank 0 while all ranks measure the same, and those of their collectives.

    On a CPU each rank computes with one thread; `ranks_per_core` says how many of them share a core.
    """
    context = multiprocessing.get_context("spawn")
    steps = context.Array("i", [0, 1])
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_run_rank, args=(rank, num_ranks, device_type, folder, limit_seconds, steps))
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        try:
            deadline = time.monotonic() + _LIMIT_SECONDS
            while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
                if any(process.exitcode for process in ranks):
                    break
                progress(*steps[:])
                time.sleep(0.1)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        found = Path(folder, "measured.json")
        if not found.exists():
            failed = [rank for rank, process in enumerate(ranks) if process.exitcode]
            raise RankFailed(f"of {num_ranks} ranks, {failed} failed or took longer than {_LIMIT_SECONDS:.0f} s")
        measured: dict[str, Any] = read_json(found, most_bytes=2**30, finite=False)
        return measured


def _run_rank(rank: int, num_ranks: int, device_type: str, folder: str, limit_seconds: float, steps: Any) -> None:
    device = torch.device("cuda", rank) if device_type == "cuda" else torch.device("cpu")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if device_type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), num_ranks)  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=_LIMIT_SECONDS),
    )

    def note(done: int, total: int) -> None:
        if rank == 0:
            steps[:] = [done, total + 1]

    measured = measure_device(device, limit_seconds=limit_seconds, progress=note)
    measured["rows"] += list(collective_rows(device, largest_bytes=_LARGEST_BYTES[device_type]))
    if device_type == "cpu":
        measured["ranks_per_core"] = num_ranks / len(os.sched_getaffinity(0))
    if "host_memory" in measured:
        # The CPU updated for all ranks at once.
        measured["host_memory"]["updates_per_s"] *= num_ranks
    if rank == 0:
        part = Path(folder, "measured.part")
        part.write_text(json.dumps(measured))
        part.rename(Path(folder, "measured.json"))
    dist.destroy_process_group()


def collective_rows(device: torch.device, *, largest_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield the time of each collective at sizes from 4 KiB up; `num_bytes` is the size of the unsharded buffer."""
    num_ranks = dist.get_world_size()
    num_bytes = 2**12
    while num_bytes <= largest_bytes:
        buffer = torch.zeros(num_bytes // 4 // num_ranks * num_ranks, device=device)
        for name, call in _calls(buffer, num_ranks=num_ranks).items():
            yield {
                "name": name,
                "num_ranks": num_ranks,
                "num_bytes": buffer.numel() * 4,
                "seconds": _seconds(call, device=device),
            }
        num_bytes *= 4


def _calls(buffer: Tensor, *, num_ranks: int) -> dict[str, Callable[[], Any]]:
    size = buffer.numel() // num_ranks
    own = buffer[dist.get_rank() * size :][:size]
    return {
        "all_reduce": lambda: dist.all_reduce(buffer),
        "all_gather": lambda: _all_gather(buffer, own),
        "reduce_scatter": lambda: _reduce_scatter(own, buffer),
    }


def _seconds(call: Callable[[], Any], *, device: torch.device) -> float:
    """Return the median time of the slowest rank."""
    timings = []
    for _ in range(_NUM_TIMINGS + 1):
        dist.all_reduce(torch.zeros(1, device=device))
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        timings.append(time.perf_counter() - began)
    slowest = torch.tensor(timings[1:], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(statistics.median(slowest.tolist()))
