"""The one helper that starts ranks: `run_ranks(body, num_ranks=2)` runs a function on every rank of a small job.

    run_ranks ──▶ a pool of num_ranks processes, kept for the whole session: each has joined one Gloo group,
                  waits for a body, runs it, sends back what it returned and said, and cleans up

Importing torch and Shardwise takes longer than most tests, so it is done once: in multiprocessing's fork server, which
then forks a worker in milliseconds. A pool in which anything went wrong is killed, and the next call starts a fresh one.
A body is a function of a module, `body(rank, *args)`; arguments and results are pickled. It runs on a process's
main thread with the random numbers seeded again; groups that it makes are destroyed for it.
"""

import atexit
import faulthandler
import gc
import importlib.util
import multiprocessing
import operator
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from reliability.said import say, take
from shardwise.comm.groups.groups import Group

# Imported once, in the fork server, instead of by each worker; torch imports dynamo at the first optimizer.
_PRELOAD = [
    *("torch", "torch.distributed", "torch._dynamo", "numpy", "pytest", "hypothesis"),
    *("shardwise.engines", "shardwise.training.rank_run"),
]
# For what is not the body: the start of a process, the import of a test's module, the clean-up.
_OVERHEAD_SECONDS = 60.0
# What libraries that a body imports leave in a process, and a worker may keep: variables, threads of tqdm and fsspec.
_SET_BY_LIBRARIES = ("TORCHINDUCTOR_", "TRITON_", "KMP_", "PYTORCH_NVML_")
_THREADS_OF_LIBRARIES = ("tqdm_monitor", "fsspecIO")
# Ranks that fail at about the same moment all get to report, so that the earliest can be told.
_GRACE_SECONDS = 0.05


class RankFailed(AssertionError):  # noqa: N818 - reads as the first word of pytest's line
    """A body raised, its process died, or it did not come back in time."""


def preload(*modules: str) -> None:
    """Have the fork server import these modules too, for a test module whose bodies import them.

    Call it where the test module is imported: pytest has imported all of them when the first body runs. What is not
    installed is left out.
    """
    _PRELOAD.extend(name for name in modules if name not in _PRELOAD)


def run_ranks(
    body: Callable[..., Any], *, num_ranks: int, args: Sequence[Any] = (), timeout_seconds: float = 60.0
) -> list[Any]:
    """Run `body(rank, *args)` on `num_ranks` ranks; what they returned, in rank order.

    Raises RankFailed with the traceback of the rank that failed first, or with the ranks that had not come back
    after `timeout_seconds` and where they were.
    """
    __tracebackhide__ = True
    if "<locals>" in body.__qualname__ or body.__module__ == "__main__":
        raise ValueError(f"{body.__qualname__}: a body must be a function of a module that can be imported")
    path = sys.modules[body.__module__].__file__
    job = pickle.dumps((body.__module__, path, body.__qualname__, pickle.dumps(tuple(args))))
    # Threads that run jobs side by side have a pool each.
    key = (threading.get_ident(), num_ranks)
    if key not in _pools:
        _pools[key] = _Pool(num_ranks=num_ranks)
    try:
        results, reusable = _pools[key].run(job, timeout_seconds=timeout_seconds)
    except BaseException:
        # Also pytest's own time-out and ^C: whatever a rank is doing now belongs to a test that is over.
        _pools.pop(key).kill()
        raise
    if not reusable:
        _pools.pop(key).kill()
    assert len(results) == num_ranks, f"{len(results)} of {num_ranks} bodies ran"
    return results


def world_group() -> Group:
    """The default group, in a body."""
    return Group(handle=dist.group.WORLD, ranks=tuple(range(dist.get_world_size())), index=dist.get_rank())


def shut_down() -> None:
    """Kill all workers. A later call of `run_ranks` starts new ones."""
    while _pools:
        _pools.popitem()[1].kill()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """What a rank says after each stage of a job. `seconds` is of the clock that all processes share."""

    ok: bool
    value: Any
    seconds: float


class _Pool:
    """Worker processes that form one job of `num_ranks` ranks."""

    def __init__(self, *, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._started = False
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        for rank in range(num_ranks):
            pipe, workers_end = context.Pipe()
            # Not daemonic, so that a body may start processes too; `_end_with_parent` leaves no orphans.
            process = context.Process(target=_serve, args=(rank, num_ranks, self._folder.name, workers_end))
            process.start()
            workers_end.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def run(self, job: bytes, *, timeout_seconds: float) -> tuple[list[Any], bool]:
        """The results by rank, and whether every worker is again as it was before."""
        __tracebackhide__ = True
        if not self._started:
            self._collect("join the job", timeout_seconds=_OVERHEAD_SECONDS)
            self._started = True
        self._send(job)
        self._collect("import the body", timeout_seconds=_OVERHEAD_SECONDS)
        results = self._collect("come back", timeout_seconds=timeout_seconds)
        # Only now: a rank that closed its connections earlier could cut off a peer that still reads from them.
        self._send(b"clean up")
        reusable = self._collect("clean up", timeout_seconds=_OVERHEAD_SECONDS)
        values, said = zip(*map(pickle.loads, results), strict=True)
        # Ranks say the same, or rank 0 says what a user sees.
        for line in next(filter(None, said), []):
            say(line)
        return list(values), all(reusable)

    def kill(self) -> None:
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._folder.cleanup()

    def _send(self, message: bytes) -> None:
        for pipe in self._pipes:
            # A process that has died is told of by `_receive`.
            with suppress(BrokenPipeError, ConnectionResetError):
                pipe.send_bytes(message)

    def _collect(self, stage: str, *, timeout_seconds: float) -> list[Any]:
        """One report from every rank, or the failure that was first in time."""
        __tracebackhide__ = True
        deadline = time.monotonic() + timeout_seconds
        reports: dict[int, _Report] = {}
        while len(reports) < self._num_ranks:
            if not self._receive(reports, deadline=deadline):
                raise RankFailed(self._missing(reports, stage=stage, timeout_seconds=timeout_seconds))
            if not all(report.ok for report in reports.values()):
                while self._receive(reports, deadline=time.monotonic() + _GRACE_SECONDS):
                    pass
                raise RankFailed(self._first_failure(reports))
        return [reports[rank].value for rank in range(self._num_ranks)]

    def _receive(self, reports: dict[int, _Report], *, deadline: float) -> bool:
        """Add what arrives next; False if nothing did until the deadline, or all have reported."""
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in reports}
        arrived = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())) if waiting else []
        for pipe in arrived:
            rank = waiting[pipe]
            try:
                reports[rank] = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                self._processes[rank].join()
                text = f"the process ended with exit code {self._processes[rank].exitcode}\n"
                # Before all others: peers that complain of a lost connection do so because of it.
                reports[rank] = _Report(ok=False, value=text, seconds=0.0)
        return bool(arrived)

    def _first_failure(self, reports: dict[int, _Report]) -> str:
        failed = [rank for rank, report in reports.items() if not report.ok]
        first = min(failed, key=lambda rank: reports[rank].seconds)
        return f"rank {first} of {self._num_ranks}: {reports[first].value}{self._printed(first)}"

    def _missing(self, reports: dict[int, _Report], *, stage: str, timeout_seconds: float) -> str:
        missing = [rank for rank in range(self._num_ranks) if rank not in reports]
        sizes = {rank: len(self._printed(rank)) for rank in missing}
        for rank in missing:
            os.kill(self._processes[rank].pid, signal.SIGUSR2)  # the worker writes where it is, see `_serve`
        for _ in range(40):
            if any(len(self._printed(rank)) == sizes[rank] for rank in missing):
                time.sleep(0.05)
        where = "".join(self._printed(rank) for rank in missing)
        return f"ranks {missing} of {self._num_ranks} did not {stage} within {timeout_seconds:g} s{where}"

    def _printed(self, rank: int) -> str:
        path = Path(self._folder.name, f"rank-{rank}.txt")
        text = path.read_text(errors="replace").strip() if path.exists() else ""
        return f"\n--- rank {rank} wrote ---\n{text}" if text else ""


_pools: dict[tuple[int, int], _Pool] = {}
atexit.register(shut_down)


# From here on: the worker's side.
def _serve(rank: int, num_ranks: int, folder: str, pipe: Connection) -> None:
    """Join the job, then run bodies until this process is killed or the other end of the pipe is gone."""
    # Python's own, as in a rank of a user (tests/started/sitecustomize.py has set another).
    gc.set_threshold(700, 10, 10)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # As in a rank of a user: the workers of a data loader, started by a fork server, would outlive this process.
    multiprocessing.set_start_method("fork", force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is the test's, which then kills the pool
    output = os.open(Path(folder, f"rank-{rank}.txt"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable(output)
    faulthandler.register(signal.SIGUSR2, file=output)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    # A CPU without bf16 turns oneDNN off at its first product in bf16, and from then on fp32 has other last bits.
    torch._C._set_mkldnn_enabled(False)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    forever = timedelta(hours=1)  # a rank that waits is reported by the pool, not by Gloo
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=forever)
    _report(pipe, value=None)
    while True:
        job = pipe.recv_bytes()
        os.ftruncate(output, 0)
        before = _state()
        try:
            body, args = _load(job)
            _report(pipe, value=None)
            result = pickle.dumps((body(rank, *args), take()))
        except BaseException:  # pytest.skip and SystemExit as well: the body did not run to its end
            _report(pipe, value=traceback.format_exc(), ok=False)
            continue
        _report(pipe, value=result)
        pipe.recv_bytes()
        del body, args, result
        _report(pipe, value=_clean_up(before))


def _report(pipe: Connection, *, value: Any, ok: bool = True) -> None:
    pipe.send_bytes(pickle.dumps(_Report(ok=ok, value=value, seconds=time.monotonic())))


def _load(job: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The body and its arguments. Its module is found by file: pytest's names for test modules are not importable."""
    name, path, qualname, args = pickle.loads(job)
    module = sys.modules.get(name)
    if module is None or module.__file__ != path:
        for end in (i for i, letter in enumerate(name) if letter == "."):
            sys.modules.setdefault(name[:end], types.ModuleType(name[:end]))
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    # What is imported stays; a collection that does not walk through it takes microseconds.
    gc.freeze()
    body = operator.attrgetter(qualname)(module)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    return body, pickle.loads(args)


def _state() -> tuple[Any, ...]:
    """What a body must leave as it was for this worker to be used again."""
    return (
        dist.group.WORLD,
        _threads(),
        {name: value for name, value in os.environ.items() if not name.startswith(_SET_BY_LIBRARIES)},
        os.getcwd(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _clean_up(before: tuple[Any, ...]) -> bool:
    """Free what the body left behind; whether this worker is again in the state `before`."""
    gc.collect()
    _destroy_groups()
    for thread in _threads() - before[1]:
        thread.join(timeout=1.0)
    return _state() == before


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name not in _THREADS_OF_LIBRARIES}


def _destroy_groups() -> None:
    """Destroy every group but the default one, all at once: each takes some 20 ms to join its threads."""
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    for group in groups:
        dist.destroy_process_group(group)
        del group
    # A group ends where its last reference is dropped, so each reference gets a thread to be dropped on.
    threads = [threading.Thread(target=[groups.pop()].clear) for _ in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _end_with_parent() -> None:
    """No orphans: the sentinel becomes ready when the test's process is gone, however it ended."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
