"""How long a save holds training up, and how much memory an export needs.

    python benchmarks/checkpoint_speed.py

stall    100M parameters with AdamW's state (1.2 GB), 2 ranks of one thread each. Each save counts with its slowest
         rank. The first one allocates and touches the memory into which the state is copied; later ones reuse it.
         In addition to wall-clock seconds: those that the thread was on a CPU, which other processes disturb less.
         And a step while nothing is written, and a step while a checkpoint is.
export   1 GB of weights in two ranks' files → one .safetensors file, in a fresh process: the most memory that was
         resident at any time, above what was resident before it began. Pages of mapped files would count.
"""

import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from engine_step import Case, on_ranks_of
from measuring import resident_bytes

from shardwise.checkpoint import Checkpoints
from shardwise.engines import prepare
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape
from shardwise.plan import Plan
from shardwise.state.checkpoint.export import export_weights

# 8 × 12 · 960² + 16k · 960 = 104M; 18 × 12 · 1024² + 30k · 1024 = 257M, which is 1.03 GB.
TRAINED = GPTShape(num_layers=8, width=960, num_heads=8, vocab_size=16_384, max_seq=64)
EXPORTED = GPTShape(num_layers=18, width=1024, num_heads=8, vocab_size=30_000, max_seq=64)
NUM_SAVES = 4


def trained(case: Case) -> Any:
    """A step of a prepared model, to be called."""
    torch.manual_seed(0)
    model = build_model(case.shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    prepare(model, optimizer, Plan(strategy=case.strategy))
    tokens = torch.randint(case.shape.vocab_size, (case.batch, case.seq + 1))

    def step() -> float:
        begun = time.perf_counter()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begun

    return model, optimizer, step


def saves(rank: int, case: Case, folder: str) -> dict[str, Any]:
    model, optimizer, step = trained(case)
    quiet = [step() for _ in range(3)][1:]
    checkpoints = Checkpoints(folder, keep=1)
    stalls, on_cpu, busy, writes, num_bytes = [], [], [], [], 0
    for number in range(NUM_SAVES):
        begun, begun_on_cpu = time.perf_counter(), time.thread_time()
        saving = checkpoints.save(model, optimizer, step=number)
        stalls.append(saving.stall_seconds)
        on_cpu.append(time.thread_time() - begun_on_cpu)
        num_bytes = saving.num_bytes
        busy.append(step())
        checkpoints.wait()
        writes.append(time.perf_counter() - begun)
    checkpoints.close()
    return {
        "stalls": stalls, "on_cpu": on_cpu, "busy": busy, "quiet": quiet, "writes": writes, "num_bytes": num_bytes
    }  # fmt: skip


def report_stall(strategy: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks = on_ranks_of(saves, Case(strategy=strategy, shape=TRAINED, batch=1, seq=16), folder)

    def slowest(key: str) -> list[float]:
        return [max(times) for times in zip(*(rank[key] for rank in ranks), strict=True)]

    first, *later = slowest("stalls")
    first_on_cpu, *later_on_cpu = slowest("on_cpu")
    on_disk, quiet, writing = (statistics.median(slowest(key)) for key in ("writes", "quiet", "busy"))
    print(
        f"{strategy:5} {sum(rank['num_bytes'] for rank in ranks) / 1e9:.2f} GB  stall: first {first:.3f} s, later "
        f"{statistics.median(later):.3f} s (at most {max(later):.3f})\n"
        f"      on a CPU: first {first_on_cpu:.3f} s, later {statistics.median(later_on_cpu):.3f} s; on disk after "
        f"{on_disk:.2f} s; a step {quiet:.2f} s, while writing {writing:.2f} s",
        flush=True,
    )


def save_weights(rank: int, case: Case, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = build_model(case.shape, device="meta")
    prepare(model, None, Plan(strategy=case.strategy), device="cpu")
    checkpoints = Checkpoints(folder, asynchronous=False)
    checkpoints.save(model, step=0)
    checkpoints.close()
    return {}


def export(path: str, out: str, answer: Any) -> None:
    before = resident_bytes("VmRSS")
    begun = time.perf_counter()
    (file,) = export_weights(Path(path), Path(out))
    seconds = time.perf_counter() - begun
    answer.put({"above_bytes": resident_bytes("VmHWM") - before, "seconds": seconds, "file_bytes": file.stat().st_size})


def report_export() -> None:
    case = Case(strategy="fsdp", shape=EXPORTED, batch=1, seq=16)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        on_ranks_of(save_weights, case, folder)
        answer: Any = context.Queue()
        arguments = (str(Path(folder, "step-00000000")), str(Path(folder, "out.safetensors")), answer)
        process = context.Process(target=export, args=arguments)
        process.start()
        found: dict[str, Any] = answer.get(timeout=180)
        process.join()
    largest = case.shape.vocab_size * case.shape.width * 4
    print(
        f"export {found['file_bytes'] / 1e9:.2f} GB in {found['seconds']:.1f} s: {found['above_bytes'] / 1e6:.0f} MB "
        f"above what was resident (largest tensor {largest / 1e6:.0f} MB)"
    )


if __name__ == "__main__":
    for name in ("ddp", "fsdp"):
        report_stall(name)
    report_export()
