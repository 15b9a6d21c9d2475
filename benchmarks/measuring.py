"""What measuring benchmarks share: the machine, a job of one rank, blocks of steps in turn, processes, files."""

import argparse
import gc
import json
import multiprocessing
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.absent import AbsentCollectives, absent_group

RESULTS = Path(__file__).resolve().parent / "results"
# A block of steps lasts about so long.
BLOCK_SECONDS = 0.4

Step = Callable[[], Any]


def options(description: str | None, **defaults: Any) -> argparse.Namespace:
    """Parse the command line. Each option takes the type of its default: a flag, numbers, words, or a path (None)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, list | tuple):
            parser.add_argument(flag, nargs="*", default=default, metavar="NAME")
        else:
            kind = Path if default is None else type(default)
            parser.add_argument(flag, type=kind, default=default, metavar=kind.__name__.upper())
    return parser.parse_args()


def show(what: str, row: Mapping[str, Any]) -> None:
    """Print the numbers of a row: seconds in ms, bytes in GiB; what is nested or empty is left out."""
    units = {"_seconds": (1e3, "ms"), "_bytes": (2**-30, "GiB")}
    parts = []
    for name, value in row.items():
        end = next((end for end in units if name.endswith(end)), "")
        if end and isinstance(value, int | float):
            factor, unit = units[end]
            parts.append(f"{name.removesuffix(end)} {factor * value:.2f} {unit}")
        elif value and not isinstance(value, Mapping):
            parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    print(f"{what}: {', '.join(parts)}", flush=True)


# The machine


def circumstances() -> dict[str, Any]:
    """Return what a result has to say of itself: machine, versions, command."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpu = platform.processor() or platform.machine()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("transformers", "accelerate"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "machine": {"processor": cpu, "cores": os.cpu_count(), "gpu": gpu, "load_average": os.getloadavg()},
        "versions": versions,
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }


def write(path: Path | None, data: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def write_part(path: Path | None, part: str, data: Any) -> None:
    """Write one part of a file, by its name; the others stay."""
    known = json.loads(path.read_text()) if path is not None and path.exists() else {}
    write(path, {**known, part: data})


@contextmanager
def job(device: str, *, num_ranks: int = 1) -> Iterator[AbsentCollectives | None]:
    """Be the only rank of a job, or rank 0 of several whose other ranks are absent.

    Yields the collectives of the absent ranks for `prepare`, None for a job of one rank.
    """
    if num_ranks > 1:
        with absent_group(num_ranks):
            yield AbsentCollectives()
        return
    join_alone(device)
    yield None
    dist.destroy_process_group()


def join_alone(device: str) -> None:
    """Join a job of one rank. Accelerate takes the group that there is, if a launcher's variables are there too."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **address}
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    if device == "cuda":
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    else:
        dist.init_process_group("gloo", rank=0, world_size=1)


# Memory


def settle() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def free() -> None:
    """Free what nothing refers to any more, so that the next training finds an empty device, and reset the peaks."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        # Tensors of torch itself, made by the first matrix product of a thread and never freed.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peaks() -> dict[str, int]:
    """Return the peaks of this process on the GPU since they were reset."""
    if not torch.cuda.is_available():
        return {"allocated_bytes": 0, "reserved_bytes": 0}
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def used_bytes() -> int:
    """Return the bytes in use on the whole device, of which torch's allocator knows a part."""
    available, total = torch.cuda.mem_get_info()
    return total - available


def resident_bytes(key: str) -> int:
    """Return the host memory of this process: VmRSS is now, VmHWM the most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


# Time


def seconds_per_step(step: Step, *, num_steps: int) -> float:
    settle()
    began = time.perf_counter()
    for _ in range(num_steps):
        step()
    settle()
    return (time.perf_counter() - began) / num_steps


def in_turn(steps: Mapping[str, Step], *, blocks: int, block_seconds: float = BLOCK_SECONDS) -> dict[str, list[float]]:
    """Return the seconds per step of each block. Blocks alternate, so that a drifting machine slows all alike."""
    # Otherwise each collection of garbage would walk through all models.
    gc.collect()
    gc.freeze()
    counts = {name: max(2, round(block_seconds / seconds_per_step(step, num_steps=2))) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(blocks):
        for name, step in steps.items():
            seconds[name].append(seconds_per_step(step, num_steps=counts[name]))
    gc.unfreeze()
    return seconds


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios of neighbouring blocks."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def spread(values: Sequence[float]) -> dict[str, float]:
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


# Processes


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


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
