"""A training step of our engine against torch's own, on the same plan, in one run.

    python benchmarks/engine_step.py --case fsdp-small            one case; `cpu` and `cuda`: all of a device
    python benchmarks/engine_step.py --case cpu --memory --out benchmarks/results/engine_step.json

Each rank is one process that holds both engines' models, made from one seed, and runs blocks of steps in turn: ours,
torch's, torch's, ours … A machine whose load drifts then slows both alike, and the ratio of neighbouring blocks stays
true where the times do not. A block counts with its slowest rank. Only ratios are results; seconds are this machine's.
In addition to wall-clock seconds: the seconds that the process was on a CPU, which other processes disturb less.

--memory also runs each engine by itself, and reports the most bytes that are live in a step, and those that are left
after its zero_grad: on a CPU from torch's allocator (base/torch_internals/cpu_allocations.py), which does not know
of the backend's own buffers, on a GPU from torch.cuda. "plain" is the model in one process without any engine: what a
rank holds at rest × ranks / plain's is 1 where nothing is held twice.
"""

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import circumstances, settle, spread, write_part
from workers import on_ranks

from shardwise.base.torch_internals.cpu_allocations import LiveBytes
from shardwise.engines import clip_grad_norm_, prepare
from shardwise.models.make import build_model
from shardwise.models.shapes import GPTShape
from shardwise.plan import Plan

ENGINES = ("shardwise", "torch")
WARM_UP_STEPS = 4
MEMORY_STEPS = 4

Step = Callable[[], torch.Tensor]
# (model, plan) → plan: what another benchmark changes before an engine gets them.
Arrange = Callable[[torch.nn.Module, Plan], Plan]
MakeStep = Callable[..., Step]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained, how, and how long it is measured. `goal`: the ratio ours / torch that we want, at most."""

    strategy: str
    shape: GPTShape
    batch: int
    seq: int
    num_ranks: int = 2
    device: str = "cpu"
    precision: str = "fp32"
    steps_per_block: int = 4
    rounds: int = 20
    clips: bool = False
    goal: float | None = None


SMALL = GPTShape(num_layers=4, width=128, num_heads=4, vocab_size=256, max_seq=64)
LARGER = GPTShape(num_layers=6, width=384, num_heads=6, vocab_size=256, max_seq=128)
# Hardly anything to compute: what is left is the host's time, for 24 units with 12 parameters each.
DEEP = GPTShape(num_layers=24, width=32, num_heads=2, vocab_size=64, max_seq=8)
GPT2 = GPTShape(num_layers=12, width=768, num_heads=12)
GPT3 = GPTShape(num_layers=24, width=2048, num_heads=16, max_seq=2048)
_SMALL = Case(strategy="ddp", shape=SMALL, batch=2, seq=64)
_LARGER = Case(strategy="ddp", shape=LARGER, batch=2, seq=128, steps_per_block=2, rounds=10)
_HOST = Case(strategy="ddp", shape=DEEP, batch=1, seq=8, num_ranks=1, clips=True)
_CUDA = Case(strategy="fsdp", shape=GPT2, batch=4, seq=1024, num_ranks=1, device="cuda", precision="bf16")

CASES = {
    "ddp-small": replace(_SMALL, goal=1.05),
    "ddp-larger": replace(_LARGER, goal=1.05),
    "fsdp-small": replace(_SMALL, strategy="fsdp", goal=0.75),
    "fsdp-larger": replace(_LARGER, strategy="fsdp", goal=0.95),
    "ddp-host": _HOST,
    "fsdp-host": replace(_HOST, strategy="fsdp"),
    # For its memory; too slow to be timed on a CPU.
    "fsdp-124m": replace(_LARGER, strategy="fsdp", shape=GPT2, batch=1, seq=16, rounds=0),
    "gpt2-124m": replace(_CUDA, steps_per_block=10),
    "gpt-1.3b-batch-2": replace(_CUDA, shape=GPT3, batch=2, seq=2048, rounds=12),
    "gpt-1.3b-batch-8": replace(_CUDA, shape=GPT3, batch=8, seq=2048, rounds=8),
}


def make_step(case: Case, *, engine: str, rank: int, arrange: Arrange = lambda model, plan: plan) -> Step:
    """Make a model on an engine ("plain": on none); return a function that trains one step and returns the loss."""
    torch.manual_seed(0)
    model = build_model(case.shape, device=case.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=case.device == "cuda")
    if engine != "plain":
        # Freed here at the latest, not by a thread of the backend, where LiveBytes would not see it.
        originals = [parameter.data for parameter in model.parameters()]
        plan = arrange(model, Plan(strategy=case.strategy, precision=case.precision, engine=engine))
        model, optimizer = prepare(model, optimizer, plan)
        del originals
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(case.shape.vocab_size, (case.batch, case.seq + 1), generator=generator).to(case.device)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()

    def step() -> torch.Tensor:
        loss = F.cross_entropy(model(inputs).flatten(0, -2).float(), targets)
        loss.backward()
        if case.clips and engine != "plain":
            clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def timed(rank: int, case: Case, make: MakeStep) -> dict[str, Any]:
    """Return the seconds per step of each block, by the wall and on a CPU, and the losses of the first steps."""
    steps = {engine: make(case, engine=engine, rank=rank) for engine in ENGINES}
    losses = {engine: [step().item() for _ in range(WARM_UP_STEPS)] for engine, step in steps.items()}
    seconds: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    cpu_seconds: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for number in range(case.rounds):
        gc.collect()
        for engine in ENGINES if number % 2 == 0 else reversed(ENGINES):
            dist.all_reduce(torch.zeros(1, device=case.device))  # a barrier, in the backend's own way
            settle()
            started, cpu_started = time.perf_counter(), time.process_time()
            for _ in range(case.steps_per_block):
                steps[engine]()
            settle()
            seconds[engine].append((time.perf_counter() - started) / case.steps_per_block)
            cpu_seconds[engine].append((time.process_time() - cpu_started) / case.steps_per_block)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "losses": losses}


def remembered(rank: int, case: Case, engines: tuple[str, ...], make: MakeStep) -> dict[str, Any]:
    """Return bytes by engine: the peak of a step, and what is left after it."""
    measure = cpu_bytes if case.device == "cpu" else cuda_bytes
    found = {}
    for engine in engines:
        found[engine] = measure(partial(make, case, engine=engine, rank=rank))
        gc.collect()
    return found


def cpu_bytes(make: Callable[[], Step]) -> dict[str, int]:
    """Return the least of several steps: what the backend's threads free unseen only adds."""
    with LiveBytes() as live:
        step = make()
        for _ in range(MEMORY_STEPS):
            with live.phase("step"):
                step()
    warm = range(1, MEMORY_STEPS)
    return {
        "peak_bytes": min(live.peak_bytes("step", run=run) for run in warm),
        "rest_bytes": min(live.end_bytes("step", run=run) for run in warm),
    }


def cuda_bytes(make: Callable[[], Step]) -> dict[str, int]:
    step = make()
    for _ in range(MEMORY_STEPS):
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "rest_bytes": torch.cuda.memory_allocated()}


def on_ranks_of(body: Callable[..., dict[str, Any]], case: Case, *others: Any) -> list[dict[str, Any]]:
    """Return what `body(rank, case, *others)` returns on each rank of a case."""
    return on_ranks(body, case, *others, num_ranks=case.num_ranks, device=case.device)


def compare(ranks: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Return the seconds of the slowest rank, and their ratio round by round."""
    by_block = {engine: zip(*(rank[engine] for rank in ranks), strict=True) for engine in ENGINES}
    slowest = {engine: [max(block) for block in blocks] for engine, blocks in by_block.items()}
    ratios = [ours / torchs for ours, torchs in zip(*slowest.values(), strict=True)]
    return {"step_seconds": {engine: spread(slowest[engine]) for engine in ENGINES}, "ratio": spread(ratios)}


def measure_time(case: Case, *, make: MakeStep = make_step) -> dict[str, Any]:
    ranks = on_ranks_of(timed, case, make)
    return {
        **compare([rank["seconds"] for rank in ranks]),
        "cpu": compare([rank["cpu_seconds"] for rank in ranks]),
        "first_losses_of_rank_0": ranks[0]["losses"],
    }


def measure_memory(case: Case, *, make: MakeStep = make_step) -> dict[str, Any]:
    """Measure bytes. A GPU's numbers are of the whole process, so there each engine gets processes of its own."""
    found: dict[str, Any] = {}
    for engines in [(*ENGINES, "plain")] if case.device == "cpu" else [(engine,) for engine in ENGINES]:
        ranks = on_ranks_of(remembered, case, engines, make)
        for engine in engines:
            # Ranks hold equal shares, so the least of them too is the one that unseen frees blur least.
            found[engine] = {key: min(rank[engine][key] for rank in ranks) for key in ("peak_bytes", "rest_bytes")}
    for engine in ENGINES if "plain" in found else ():
        held = found[engine]["rest_bytes"] * case.num_ranks
        found[engine]["rest_of_all_ranks_to_plain"] = held / found["plain"]["rest_bytes"]
    return found


def report(name: str, found: dict[str, Any]) -> None:
    """Print a line of times, and one of memory, as far as they were measured."""
    if "time" in found:
        ratio, goal = found["time"]["ratio"], found["case"]["goal"]
        ours, torchs = (1000 * found["time"]["step_seconds"][engine]["median"] for engine in ENGINES)
        verdict = "" if goal is None else f"  goal ≤ {goal}: {'met' if ratio['median'] <= goal else 'missed'}"
        span = f"[{ratio['q1']:.3f}, {ratio['q3']:.3f}]"
        span += f" (on the CPU {found['time']['cpu']['ratio']['median']:.3f})"
        print(
            f"{name:18} ours {ours:8.2f} ms  torch {torchs:8.2f} ms  ratio {ratio['median']:.3f} {span}{verdict}",
            flush=True,
        )
    for engine, bytes_ in found.get("memory", {}).items():
        peak, rest = bytes_["peak_bytes"] / 2**20, bytes_["rest_bytes"] / 2**20
        times = bytes_.get("rest_of_all_ranks_to_plain")
        share = "" if times is None else f"  × ranks / plain = {times:.3f}"
        print(f"{name:18} {engine:9} peak {peak:9.1f} MiB  at rest {rest:9.1f} MiB{share}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=[*CASES, "cpu", "cuda"])
    parser.add_argument("--ranks", type=int, help="instead of the case's own number of ranks")
    parser.add_argument("--memory", action="store_true", help="measure memory, too")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    results: dict[str, Any] = {**circumstances(), "cases": {}}
    for name, case in CASES.items():
        if options.case not in (name, case.device):
            continue
        case = replace(case, num_ranks=options.ranks or case.num_ranks)
        found: dict[str, Any] = {"case": asdict(case)}
        if case.rounds:
            found["time"] = measure_time(case)
        if options.memory:
            found["memory"] = measure_memory(case)
        results["cases"][name] = found
        report(name, found)
    write_part(options.out, CASES[options.case].device if options.case in CASES else options.case, results)


if __name__ == "__main__":
    main()
