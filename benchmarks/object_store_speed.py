"""The rate of a save into an S3 server on this machine, compared with those of boto3 and of s3fs.

    python benchmarks/object_store_speed.py [--bytes 2000000000] [--rounds 3]

The server is moto's, in a process of its own, at a free port of 127.0.0.1. 4 ranks hold a model of `--bytes` under
fsdp. In turn, each rank uploads its share with boto3's `upload_fileobj` (parts of 8 MiB, up to 10 side by side) and
with s3fs's `pipe_file`, and all save a checkpoint: checksums, parts, and the manifest at the end. A round counts until
its slowest rank is done; one round goes before, in which clients are made. The server, the clients and the ranks share
this machine's cores: the rates are the server's, and the ratio is what counts. The CPU seconds of a rank are less
disturbed by other processes.
"""

import argparse
import io
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.checkpoint import Checkpoints
from shardwise.engines import prepare
from shardwise.plan import Plan

NUM_RANKS = 4
BUCKET = "speed"
WIDTH = 2048


@contextmanager
def serving() -> Iterator[str]:
    """Yield the URL of a server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            if socket.socket().connect_ex(("127.0.0.1", port)) == 0:
                break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def client() -> Any:
    import boto3

    return boto3.client("s3")


def removed() -> None:
    """Remove all objects: the server keeps them in memory and in temporary files."""
    s3 = client()
    for item in s3.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        s3.delete_object(Bucket=BUCKET, Key=item["Key"])


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds until the slowest rank is done, and the CPU seconds of this rank."""
    dist.barrier()
    begun, begun_on_cpu = time.perf_counter(), time.process_time()
    action()
    on_cpu = time.process_time() - begun_on_cpu
    dist.barrier()
    return time.perf_counter() - begun, on_cpu


def rank_body(rank: int, folder: str, num_bytes: int, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_bytes // (4 * WIDTH**2))))
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    model, _ = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan(strategy="fsdp"))
    import s3fs

    share, s3 = os.urandom(2**20) * (size // NUM_RANKS // 2**20), client()
    checkpoints = Checkpoints(f"s3://{BUCKET}/run", keep=1, asynchronous=False)
    contestants: dict[str, Callable[[int], object]] = {
        "boto3": lambda number: s3.upload_fileobj(io.BytesIO(share), BUCKET, f"plain/{rank}"),
        "s3fs": lambda number: s3fs.S3FileSystem().pipe_file(f"{BUCKET}/plain/{rank}", share),
        "save": lambda number: checkpoints.save(model, step=number),
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, upload in contestants.items():
            taken[name].append(timed(partial(upload, number)))
            if rank == 0:
                removed()
    checkpoints.close()
    if rank == 0:
        results.put((size, {name: rounds[1:] for name, rounds in taken.items()}))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=2_000_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with serving() as url, tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none",
            "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }
        client().create_bucket(Bucket=BUCKET)
        context = multiprocessing.get_context("spawn")
        results = context.Queue()
        ranks = [
            context.Process(target=rank_body, args=(rank, folder, asked.bytes, asked.rounds, results), daemon=True)
            for rank in range(NUM_RANKS)
        ]
        for process in ranks:
            process.start()
        num_bytes, taken = results.get(timeout=1800)
        for process in ranks:
            process.join()
    medians = {name: statistics.median(seconds for seconds, _ in rounds) for name, rounds in taken.items()}
    for name, rounds in taken.items():
        rates = ", ".join(f"{num_bytes / seconds / 1e6:.0f}" for seconds, _ in rounds)
        on_cpu = statistics.median(seconds for _, seconds in rounds)
        print(f"{name:<6} {rates} MB/s; {on_cpu:.2f} CPU seconds on rank 0")
    for name in ("boto3", "s3fs"):
        print(f"ratio  {medians[name] / medians['save']:.2f} of {name}'s rate, {num_bytes / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
