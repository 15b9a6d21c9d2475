"""Train a small GPT under ddp and under fsdp on 4 local CPU ranks; check that they agree; show what a rank holds.

python examples/compare_ddp_fsdp.py [--ranks 4] [--steps 30]
"""

import argparse
import os
import tempfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

import shardwise
from shardwise import DistributedSampler, Plan, load_task
from shardwise.engine.held import held_bytes
from shardwise.placement import SHARDED
from shardwise.program import Kind

STRATEGIES = ("ddp", "fsdp")
MICRO_BATCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one strategy gave: the mean loss of each step, and the bytes of rank 0 by category at their largest."""

    losses: list[float]
    peak_bytes: dict[str, int]


def train(strategy: str, *, steps: int) -> Run:
    """An ordinary loop; `prepare` is the only line that knows of ranks, besides the sampler."""
    torch.manual_seed(0)
    task = load_task("gpt-tiny", dataset="stdlib", seq=64)
    assert task.dataset is not None
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=2e-3)
    model, optimizer = shardwise.prepare(task.model, optimizer, Plan(strategy=strategy))

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(len(task.dataset), rank=rank, num_ranks=num_ranks, endless=True)  # type: ignore[arg-type]
    batches = DataLoader(task.dataset, batch_size=MICRO_BATCH, sampler=sampler)
    losses = []
    peak: dict[str, int] = {}
    with shardwise.tape(model) as tape:
        for batch in islice(batches, steps):
            loss = task.loss(model, batch)
            loss.backward()
            held = held_bytes(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / num_ranks)
            temporary = _temporary(tape.take())
            if shardwise.STRATEGIES[strategy].grads is not SHARDED:
                temporary["reduce"] = 0  # the buffer that is reduced stays, as the gradients
            for name, num_bytes in {**held, **temporary}.items():
                peak[name] = max(peak.get(name, 0), num_bytes)
    return Run(losses=losses, peak_bytes=peak)


def _temporary(entries: list) -> dict[str, int]:
    """The most that gathered parameters, and gradients being reduced, took in a step: from its tape."""
    now = {"gathered": 0, "reduce": 0}
    most = dict(now)
    change = {
        Kind.GATHER: ("gathered", 1),
        Kind.FREE: ("gathered", -1),
        Kind.REDUCE: ("reduce", 1),
        Kind.WAIT_REDUCE: ("reduce", -1),
    }
    for entry in entries:
        if entry.kind in change:
            name, sign = change[entry.kind]
            now[name] += sign * entry.num_bytes
            most[name] = max(most[name], now[name])
    return most


def run_rank(rank: int, num_ranks: int, folder: str, steps: int) -> None:
    """One rank of the job: both strategies, one after the other. Ranks meet over a file, on the loopback."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    runs = {strategy: train(strategy, steps=steps) for strategy in STRATEGIES}
    if rank == 0:
        torch.save({name: (run.losses, run.peak_bytes) for name, run in runs.items()}, f"{folder}/runs")
    dist.destroy_process_group()


def show(runs: dict[str, Run], *, num_ranks: int, console: Console) -> None:
    table = Table(title=f"Bytes on each of {num_ranks} ranks, at their largest", header_style="bold")
    table.add_column("")
    categories = ("params", "grads", "optim", "gathered", "reduce")
    for name in categories:
        table.add_column(name, justify="right")
    for strategy, run in runs.items():
        table.add_row(strategy, *(f"{run.peak_bytes.get(name, 0) / 2**20:.2f} MiB" for name in categories))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    console = Console()
    console.print(f"gpt-tiny on {options.ranks} ranks, {options.steps} steps under ddp, then under fsdp …")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, args=(options.ranks, folder, options.steps), nprocs=options.ranks)
        saved = torch.load(Path(folder) / "runs")
    runs = {name: Run(losses=losses, peak_bytes=peak) for name, (losses, peak) in saved.items()}
    for step in sorted({0, options.steps // 2, options.steps - 1}):
        shown = ", ".join(f"{name} {run.losses[step]:.6f}" for name, run in runs.items())
        console.print(f"step {step + 1:3}: loss {shown}", highlight=False)
    ddp, fsdp = (torch.tensor(runs[name].losses, dtype=torch.float64) for name in STRATEGIES)
    worst = float(((ddp - fsdp).abs() / ddp).max())
    # The ranks' gradients are summed in another order; nothing else differs.
    if worst > 1e-4:
        raise SystemExit(f"ddp and fsdp do not agree: their losses differ by up to {worst:.1e}")
    console.print(f"the losses agree to {worst:.1e}", highlight=False)
    show(runs, num_ranks=options.ranks, console=console)


if __name__ == "__main__":
    main()
