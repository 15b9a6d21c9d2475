"""Processes that benchmarks start: scripts, ranks of a job, and how they hand over results."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def torchrun(num_ranks: int) -> list[str]:
    """Return what goes before a script's path, so that torchrun starts it; nothing for 0 ranks."""
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)] if num_ranks else []


class ProcessFailed(SystemExit):
    """A process that was started here has failed; its last words."""


def output_of(*arguments: str, limit_seconds: float = 600.0, **options: Any) -> str:
    """Run Python with these arguments and return its standard output."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )
    try:
        output, errors = process.communicate(timeout=limit_seconds)
    except BaseException:
        # With a launcher its ranks, which would outlive it.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode:
        raise ProcessFailed(f"{' '.join(arguments)} failed:\n{output[-2000:]}{errors[-4000:]}")
    return output


def in_processes(
    script: str, names: Iterable[str], *options: str, limit_seconds: float
) -> Iterator[tuple[str, list[Any]]]:
    """Yield what `script --here NAME` has told for each name, each in a fresh process. One that fails is printed."""
    for name in names:
        try:
            found = results_of(output_of(script, "--here", name, *options, limit_seconds=limit_seconds))
        except (ProcessFailed, subprocess.TimeoutExpired) as error:
            print(error, flush=True)
        else:
            yield name, found


def on_ranks(
    body: Callable[..., Any], *args: Any, num_ranks: int, device: str | None = "cpu", limit_seconds: float = 200.0
) -> list[Any]:
    """Return what `body(rank, *args)` returns on each rank of a job. Ranks are fresh processes; results go as JSON.

    `device` = None: the body itself joins the job.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, num_ranks, device, limit_seconds, folder, body, args))
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + limit_seconds
        while any(process.is_alive() for process in ranks) and time.monotonic() < deadline:
            if any(process.exitcode for process in ranks):
                break
            time.sleep(0.05)
        for process in ranks:
            process.kill()
            process.join()
        missing = [rank for rank in range(num_ranks) if not Path(folder, f"{rank}.json").exists()]
        if missing:
            raise ProcessFailed(f"ranks {missing} of {num_ranks} failed, or took longer than {limit_seconds:.0f} s")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(num_ranks)]


def _rank(
    rank: int,
    num_ranks: int,
    device: str | None,
    limit_seconds: float,
    folder: str,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if device is None:
        Path(folder, f"{rank}.json").write_text(json.dumps(body(rank, *args)))
        return
    if device == "cuda":
        torch.cuda.set_device(rank)
    store, limit = dist.FileStore(str(Path(folder, "store")), num_ranks), timedelta(seconds=limit_seconds)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=limit)
    Path(folder, f"{rank}.json").write_text(json.dumps(body(rank, *args)))
    # A rank that left early could cut off one that still reads.
    dist.all_reduce(torch.zeros(1, device=device))
    dist.destroy_process_group()


def tell(result: Any) -> None:
    """Hand a result to the process that started this one: `results_of`."""
    print("RESULT " + json.dumps(result), flush=True)


def results_of(output: str) -> list[Any]:
    """Return what a process has told (`tell`), from its standard output."""
    return [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if line.startswith("RESULT ")]
