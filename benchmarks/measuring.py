"""What measuring benchmarks share: the machine, a job of one rank, blocks of steps in turn, files."""

import argparse
import gc
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.job.absent import AbsentCollectives, absent_group

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


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# The machine


def circumstances() -> dict[str, Any]:
    """Return what a result has to say of itself: machine, versions, command."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpu = platform.processor() or platform.machine()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("transformers", "accelerate", "torchao"):
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


def replace_rows(path: Path | None, rows: Sequence[dict[str, Any]], *, key: Callable[[Any], Any], **more: Any) -> None:
    """Write rows into a file, instead of those that have the same key; the others stay."""
    known = json.loads(path.read_text())["rows"] if path is not None and path.exists() else []
    keys = [key(row) for row in rows]
    write(path, {**circumstances(), **more, "rows": [row for row in known if key(row) not in keys] + list(rows)})


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
    try:
        yield None
    finally:
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


def compared(
    makes: Mapping[str, Callable[[], Callable[[], Any]]],
    *,
    warm_up: int,
    blocks: int,
    ratios: Iterable[tuple[str, str]],
) -> dict[str, Any]:
    """Set up all steps, one after the other, and measure them in turn. A step that fails is listed with its error.

    A step returns its loss. `peak_bytes`: the most that one had allocated, without what those before it hold.
    """
    steps, losses, most, failed = {}, {}, {}, {}
    for name, make in makes.items():
        free()
        held = peaks()["allocated_bytes"]
        try:
            step = make()
            losses[name] = [step().item() for _ in range(warm_up)]
        except Exception as error:
            failed[name] = one_line(error)
            continue
        steps[name], most[name] = step, peaks()["allocated_bytes"] - held
    seconds = in_turn(steps, blocks=blocks)
    return {
        "step_seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "block_seconds": seconds,
        "peak_bytes": most,
        "ratios": {
            f"{ours} / {theirs}": median_ratio(seconds[ours], seconds[theirs])
            for ours, theirs in ratios
            if ours in seconds and theirs in seconds
        },
        "first_losses": {name: found[:3] for name, found in losses.items()},
        "last_losses": {name: found[-1] for name, found in losses.items()},
        "failed": failed,
    }


def show_compared(what: str, row: Mapping[str, Any]) -> None:
    times = {name: f"{1e3 * seconds:.1f} ms" for name, seconds in row["step_seconds"].items()}
    sizes = {name: f"{size / 2**30:.2f} GiB" for name, size in row["peak_bytes"].items()}
    print(what, times, sizes, row["ratios"], row.get("messages", ""), row["failed"], flush=True)


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios of neighbouring blocks."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def spread(values: Sequence[float]) -> dict[str, float]:
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}
