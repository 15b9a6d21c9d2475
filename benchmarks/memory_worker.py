"""A process that measures the memory of one case after the other; validate_memory.py starts it.

It is one rank of a real job, or rank 0 of a rehearsal. Between cases everything is freed; what was live before a
model was made, and what is left after it, stand in its row.
"""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from memory_cases import Case
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.comm.absent import AbsentCollectives, absent_group, leave_out_reduce
from shardwise.engines import prepare
from shardwise.models.catalogue import shape_of
from shardwise.plan import Plan
from shardwise.profile.cpu_allocations import LiveBytes
from shardwise.spec import ROOT
from shardwise.tasks import Task, load_task
from shardwise.units import unit_modules

# Our engine learns the order of units in the first step, and all have made their states after it.
WARM_UP_STEPS = 2
MEASURED_STEPS = 2

Step = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Which rank of what. `absent`: the others do not exist. `folder`: where ranks that do exist meet."""

    device: str
    rank: int = 0
    num_ranks: int = 1
    absent: bool = False
    folder: str = ""

    @property
    def place(self) -> str:
        return "cuda:0" if self.device == "cuda" else "cpu"


def serve(connection: Connection, job: Job) -> None:
    """Say what the process itself takes, then a row for each case that is asked for; None is the end."""
    os.environ.update(NCCL_HOSTID=f"host{job.rank}", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    if job.device == "cuda":
        torch.cuda.set_device(0)
    own = _device_used(job)
    with absent_group(job.num_ranks) if job.absent else _real_group(job):
        connection.send({**_circumstances(job), "context_bytes": own, "communicator_bytes": _communicators(job)})
        while (case := connection.recv()) is not None:
            connection.send(measure(case, job=job))


@contextmanager
def _real_group(job: Job) -> Iterator[None]:
    backend = "nccl" if job.device == "cuda" else "gloo"
    store = dist.FileStore(str(Path(job.folder, "store")), job.num_ranks)
    dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _device_used(job: Job) -> int | None:
    """Bytes in use on the whole device, of which torch's allocator knows a part."""
    if job.device != "cuda":
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free


def _communicators(job: Job) -> list[int]:
    """What the first NCCL communicator takes, and a second one over the same ranks."""
    if job.device != "cuda" or job.absent:
        return []
    probe = torch.zeros(1, device="cuda")
    found = []
    for group in (None, dist.new_group()):
        before = _device_used(job)
        dist.all_reduce(probe, group=group)
        torch.cuda.synchronize()
        after = _device_used(job)
        assert before is not None
        assert after is not None
        found.append(after - before)
    return found


def _circumstances(job: Job) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0) if job.device == "cuda" else None
    return {
        "rank": job.rank,
        "num_ranks": job.num_ranks,
        "absent": job.absent,
        "torch": torch.__version__,
        "device": properties.name if properties else "cpu",
        "capacity_bytes": properties.total_memory if properties else None,
    }


def measure(case: Case, *, job: Job) -> dict[str, Any]:
    """The row of a case. What goes wrong with it is its error, and no reason to stop."""
    started = time.perf_counter()
    row = case.as_data() | {"torch": torch.__version__, "absent": job.absent, "error": None}
    try:
        row |= _on_cuda(case, job=job) if job.device == "cuda" else _on_cpu(case, job=job)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    # Outside of the handler, where the traceback no longer holds the tensors of the frames it passed.
    _free_everything(job)
    left = torch.cuda.memory_allocated() if job.device == "cuda" else 0
    return row | {"left_bytes": left, "seconds": round(time.perf_counter() - started, 2)}


def _free_everything(job: Job) -> None:
    gc.collect()
    if job.device == "cuda":
        torch.cuda.synchronize()
        # They are torch's own tensors, made by the first matrix product of a thread and never freed.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def _on_cuda(case: Case, *, job: Job) -> dict[str, Any]:
    """Peaks of a step in steady state.

    The cache is emptied after `prepare`: what it held for a moment is no part of a step, and reported by itself.
    """
    before, retries = torch.cuda.memory_allocated(), torch.cuda.memory_stats()["num_alloc_retries"]
    torch.cuda.reset_peak_memory_stats()
    step = make_step(case, job=job)
    prepared_peak = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    for _ in range(WARM_UP_STEPS):
        step()
    peaks, requested, seconds = [], [], 0.0
    for _ in range(MEASURED_STEPS):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        step()
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
        "device_bytes": _device_used(job),
        "alloc_retries": torch.cuda.memory_stats()["num_alloc_retries"] - retries,
        "step_seconds": round(seconds, 4),
    }


def _on_cpu(case: Case, *, job: Job) -> dict[str, Any]:
    """The same from the profiler, which knows of live bytes only; what a backend's thread frees unseen only adds."""
    with LiveBytes() as live:
        step = make_step(case, job=job)
        for number in range(WARM_UP_STEPS + MEASURED_STEPS):
            with live.phase("step") if number >= WARM_UP_STEPS else nullcontext():
                step()
    peaks = [live.peak_bytes("step", run=run) for run in range(MEASURED_STEPS)]
    return {
        "before_bytes": 0,
        "allocated_bytes": min(peaks),
        "allocated_bytes_by_step": peaks,
        "rest_bytes": live.end_bytes("step"),
        "reserved_bytes": None,
        "device_bytes": None,
    }


def task_and_plan(case: Any, *, captured: bool = False) -> tuple[Task, Plan]:
    """The model of a case, on the meta device, and its plan. Torch's engine recomputes by marks on the units."""
    torch.manual_seed(0)
    task = load_task(case.model, seq=case.seq, image=case.image, device="meta")
    ours = case.engine == "shardwise"
    if case.recompute == "full" and not ours:
        recompute_units(task.model)
    plan = Plan(
        strategy=case.strategy,
        precision=case.precision,
        recompute=case.recompute if ours else "none",
        engine=case.engine,
        capture=captured,
    )
    return task, plan


def make_step(case: Case, *, job: Job) -> Step:
    """A model from the meta device straight onto its engine, and a function that trains one step."""
    task, plan = task_and_plan(case)
    model, optimizer = prepare(
        task.model,
        make_optimizer(case.optimizer, task.model),
        plan,
        device=job.place,
        collectives=AbsentCollectives() if job.absent and plan.engine == "shardwise" else None,
    )
    if job.absent:
        leave_out_reduce(model)
    batch = make_batch(task.make_batch(case.batch), case=case, device=job.place)

    def step() -> None:
        task.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def recompute_units(model: nn.Module) -> None:
    """What `Plan(recompute="full")` means to our engine, for torch's: each unit's forward runs again in backward."""
    for name, module in unit_modules(model).items():
        if name != ROOT:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    fused = name == "adamw-fused"
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused or None, foreach=not fused or None)


def make_batch(described: tuple[Tensor, Tensor], *, case: Case, device: str) -> tuple[Tensor, Tensor]:
    """Random values in the place of a batch on the meta device; tokens and labels that there are."""
    shape: Any = shape_of(case.model)
    num_labels = shape.vocab_size if case.seq else shape.num_classes

    def real(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, dtype=tensor.dtype, device=device)
        return torch.randint(num_labels, tensor.shape, dtype=tensor.dtype, device=device)

    inputs, targets = described
    return real(inputs), real(targets)
