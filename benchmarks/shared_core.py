"""The host probe on an emulated slower host: a core that other processes use as well. CPU only, about a minute.

    python benchmarks/shared_core.py [--core 0]

One process pinned to a core calibrates it, then trains tiny models as one Gloo rank, while 0, 1 and 3 busy processes
run on the same core. Steps and turns of the probe alternate. Each step is predicted by the calibration with the host as
it was probed next to it, and by the calibration alone. Writes benchmarks/results/shared_core.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_step import circumstances

from shardwise import Plan
from shardwise.engines import prepare
from shardwise.hardware.calibrate import measure_device
from shardwise.hardware.cluster_file import read_cluster_file
from shardwise.hardware.device_file import device_table, write_table
from shardwise.hardware.probe_host import HostWatch
from shardwise.planner.time.step_time import estimate_time
from shardwise.sources import Source
from shardwise.tasks import load_task

RESULTS = Path(__file__).parent / "results" / "shared_core.json"
CPU = torch.device("cpu")
# Model → samples, tokens.
MODELS = {"gpt-tiny": (2, 64), "llama-tiny": (2, 64)}
STRATEGIES = ("ddp", "fsdp")
NUM_OTHERS = (0, 1, 3)


@contextmanager
def busy(count: int, *, core: int) -> Iterator[None]:
    """So many other processes on the core, which never rest."""
    command = [sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"]
    others = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measure(name: str, *, strategy: str, seconds: float) -> dict[str, Any]:
    """The mean step, and the host's seconds: a step that another process interrupts counts as it is."""
    batch_size, seq = MODELS[name]
    task = load_task(name, seq=seq)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-4, fused=True)
    model, optimizer = prepare(task.model, optimizer, Plan(strategy=strategy), device="cpu")
    batch = task.make_batch(batch_size)
    watch, times = HostWatch(CPU), []

    def step() -> None:
        task.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        began = time.perf_counter()
        for _ in range(5):
            step()
        times.append((time.perf_counter() - began) / 5)
        watch.turn()
    return {"step_seconds": statistics.fmean(times), "host": watch.speed()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3.0, help="per row")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.sched_setaffinity(0, {options.core})
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "device.toml")
        write_table(device_table(measure_device(CPU, limit_seconds=200)), table)
        cluster = read_cluster_file(table)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for name in MODELS:
            source = Source(name, seq=MODELS[name][1], kernels="cpu")
            for strategy in STRATEGIES:
                for count in NUM_OTHERS:
                    with busy(count, core=options.core):
                        found = measure(name, strategy=strategy, seconds=options.seconds)
                    plan = Plan(strategy=strategy, micro_batch=MODELS[name][0], precision="fp32")
                    spec = source.spec_for(plan)
                    probed = replace(cluster, device=replace(cluster.device, host=found["host"]))
                    row = {"model": name, "strategy": strategy, "others": count} | found
                    for way, where in (("probed", probed), ("assumed", cluster)):
                        time_found = estimate_time(spec, plan=plan, cluster=where, optimizer="adamw-fused")
                        assert time_found is not None
                        row[way] = time_found.step_seconds
                    print(
                        f"{name:10} {strategy:5} {count} others: {1e3 * row['step_seconds']:6.2f} ms measured, "
                        f"{1e3 * row['probed']:6.2f} probed ({row['probed'] / row['step_seconds'] - 1:+.0%}), "
                        f"{1e3 * row['assumed']:6.2f} assumed ({row['assumed'] / row['step_seconds'] - 1:+.0%}); "
                        f"share {row['host'].share:.2f}",
                        flush=True,
                    )
                    rows.append(row | {"host": found["host"].to_data()})
        dist.destroy_process_group()
    options.out.write_text(json.dumps({**circumstances(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
