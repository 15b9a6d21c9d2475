"""A process that measures the memory of one case after the other; validate_memory.py starts it.

It is one rank of a real job, or rank 0 of a rehearsal. Between cases everything is freed; what was live before a
model was made, and what is left after it, stand in its row.
"""

import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import free, one_line, used_bytes
from training_case import Case, Training, set_up

from shardwise.base.torch_internals.cpu_allocations import LiveBytes
from shardwise.comm.job.absent import AbsentCollectives, absent_group, leave_out_reduce

# Our engine learns the order of units in the first step, and all have made their states after it.
WARM_UP_STEPS = 2
MEASURED_STEPS = 2
CASE_SECONDS = 60
# With this much left of a case, the next ones are measured in other processes.
LEFT_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process is a rank of. `absent`: the other ranks do not exist. `folder`: where they meet, and rows go."""

    device: str
    num_ranks: int
    absent: bool
    folder: str
    seconds: float

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"


def serve(rank: int, job: Job, cases: Sequence[Case]) -> None:
    """Append to rows.jsonl what the process itself takes, then a row for each case, until the time is over."""
    deadline = time.monotonic() + job.seconds
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo")
    if job.is_cuda:
        torch.cuda.set_device(0)
    own = used_bytes() if job.is_cuda else None
    if not job.absent:
        store = dist.FileStore(str(Path(job.folder, "store")), job.num_ranks)
        dist.init_process_group("nccl" if job.is_cuda else "gloo", store=store, rank=rank, world_size=job.num_ranks)
    with absent_group(job.num_ranks) if job.absent else nullcontext():
        _append({**_circumstances(rank, job), "context_bytes": own, "communicator_bytes": _communicators(job)}, job=job)
        for case in cases:
            if time.monotonic() > deadline:
                break
            # Ends the process where a case hangs.
            signal.alarm(CASE_SECONDS)
            row = measure(case, job=job)
            everyone: list[Any] = [row]
            if job.num_ranks > 1 and not job.absent:
                everyone = [None] * job.num_ranks
                dist.all_gather_object(everyone, row)
            if rank == 0:
                _append(row | {"other_ranks": [other.get("allocated_bytes") for other in everyone[1:]]}, job=job)
            if any(one["left_bytes"] > LEFT_BYTES for one in everyone):
                break
        signal.alarm(0)


def _append(row: dict[str, Any], *, job: Job) -> None:
    with Path(job.folder, "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def _communicators(job: Job) -> list[int]:
    """Return the bytes of the first NCCL communicator, and of a second one over the same ranks."""
    found = []
    for number in range(2 if job.is_cuda and not job.absent else 0):
        group = dist.new_group() if number else None
        probe = torch.zeros(1, device="cuda")
        before = used_bytes()
        dist.all_reduce(probe, group=group)
        torch.cuda.synchronize()
        found.append(used_bytes() - before)
    return found


def _circumstances(rank: int, job: Job) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0) if job.is_cuda else None
    return {
        "rank": rank,
        "num_ranks": job.num_ranks,
        "absent": job.absent,
        "torch": torch.__version__,
        "device": properties.name if properties else "cpu",
        "capacity_bytes": properties.total_memory if properties else None,
    }


def measure(case: Case, *, job: Job) -> dict[str, Any]:
    """Return the row of a case. What goes wrong with it is its error, and no reason to stop."""
    started = time.perf_counter()
    row = case.as_data() | {"torch": torch.__version__, "absent": job.absent, "error": None}
    try:
        row |= _on_cuda(case, job=job) if job.is_cuda else _on_cpu(case, job=job)
    except Exception as error:
        row["error"] = one_line(error)
    # Outside of the handler, where the traceback no longer holds the tensors of the frames it passed.
    free()
    left = torch.cuda.memory_allocated() if job.is_cuda else 0
    return row | {"left_bytes": left, "seconds": round(time.perf_counter() - started, 2)}


def _set_up(case: Case, *, job: Job) -> Training:
    rehearses_ours = job.absent and case.engine == "shardwise"
    device = "cuda:0" if job.is_cuda else "cpu"
    training = set_up(case, device=device, collectives=AbsentCollectives() if rehearses_ours else None)
    if job.absent:
        leave_out_reduce(training.model)
    return training


def _on_cuda(case: Case, *, job: Job) -> dict[str, Any]:
    """Return the peaks of a step in steady state.

    The cache is emptied after `prepare`: what it held for a moment is no part of a step, and reported by itself.
    """
    before, retries = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["num_alloc_retries"]
    torch.cuda.reset_peak_memory_stats()
    training = _set_up(case, job=job)
    prepared_peak = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    for _ in range(WARM_UP_STEPS):
        training.step()
    peaks, requested, seconds = [], [], 0.0
    for _ in range(MEASURED_STEPS):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        training.step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        peaks.append(torch.cuda.max_memory_allocated())
        requested.append(torch.cuda.memory_stats()["requested_bytes.all.peak"])
    return {
        "before_bytes": before,
        "prepare_bytes": prepared_peak,
        "allocated_bytes": max(peaks),
        "allocated_bytes_by_step": peaks,
        "requested_bytes": max(requested),
        "rest_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_bytes": used_bytes(),
        "alloc_retries": torch.cuda.memory_stats()["num_alloc_retries"] - retries,
        "step_seconds": round(seconds, 4),
    }


def _on_cpu(case: Case, *, job: Job) -> dict[str, Any]:
    """Return the same from the profiler, which knows of live bytes only."""
    with LiveBytes() as live:
        training = _set_up(case, job=job)
        for number in range(WARM_UP_STEPS + MEASURED_STEPS):
            with live.phase("step") if number >= WARM_UP_STEPS else nullcontext():
                training.step()
    peaks = [live.peak_bytes("step", run=run) for run in range(MEASURED_STEPS)]
    return {
        "before_bytes": 0,
        # What a backend's thread frees unseen only adds.
        "allocated_bytes": min(peaks),
        "allocated_bytes_by_step": peaks,
        "rest_bytes": live.end_bytes("step"),
        "reserved_bytes": None,
        "device_bytes": None,
    }
