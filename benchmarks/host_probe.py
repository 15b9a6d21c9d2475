"""The host probe, with eager and captured steps, on one GPU: `python benchmarks/host_probe.py`, about three minutes.

A host that several share is not the same from one second to the next, so each row probes it in turns with its own
steps. Two kinds of rows, which fit_overhead.py reads:

fitted      catalogue models small enough that the CPU bounds them, under ddp and under fsdp
validated   four Hugging Face models (captured_models.py), ddp and fsdp, eager and captured, with their memory

A row: the median of blocks of steps; when the CPU had issued forward, backward and update; peaks of memory over all
steps. Of one eager step of each validated model, the device's seconds by operation (`kernels`). Writes
benchmarks/results/host_probe_h200.json, after every row.
"""

import argparse
import gc
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "host_probe_h200.json"
# Catalogue model → samples, and tokens or pixels.
FITTED: dict[str, tuple[int, dict[str, int]]] = {
    "gpt2-124m": (4, {"seq": 1024}),
    "vit-large": (16, {"image": 224}),
    "resnet50": (32, {"image": 224}),
    "llama-3.2-1b": (1, {"seq": 2048}),
}
# Fitted and validated in turn, so that a slower minute does not come to one kind alone.
ORDER = (
    *("gpt2-124m", "qwen3-0.6b", "vit-large", "bert-large"),
    *("gemma3-1b", "resnet50", "llama-1b", "llama-3.2-1b"),
)
# (strategy, capture)
FITTED_WAYS = (("ddp", "off"), ("fsdp", "off"))
VALIDATED_WAYS = (("fsdp", "off"), ("fsdp", "auto"), ("ddp", "off"), ("ddp", "auto"))
NUM_BLOCKS = 6
NUM_WATCHED = 3
TURNS_PER_BLOCK = 2
PHASES = ("forward", "backward", "update")


@dataclass(frozen=True, kw_only=True)
class Made:
    """A model with its loss, on the device."""

    model: Any
    batch: tuple[Any, ...]
    loss: Callable[..., Any]


def make_hugging_face(name: str, *, device: str) -> Made:
    import torch
    import transformers
    from captured_models import CONFIGS, MODELS

    kind, size, seq, config = MODELS[name]
    made = getattr(transformers, CONFIGS[kind])(**config)
    with torch.device(device):
        model = getattr(transformers, kind)._from_config(made, attn_implementation="sdpa").float().train()
    ids = torch.randint(5, config["vocab_size"], (size, seq), device=device)
    mask = torch.ones_like(ids)

    def loss(ids: Any, mask: Any) -> Any:
        return model(input_ids=ids, attention_mask=mask, labels=ids).loss

    return Made(model=model, batch=(ids, mask), loss=loss)


def make_catalogue(name: str, *, device: str) -> Made:
    import torch
    from torch.utils._pytree import tree_map_only

    from shardwise.tasks import load_task

    size, shape = FITTED[name]
    task = load_task(name, seq=shape.get("seq"), image=shape.get("image"), device=device)
    batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), task.make_batch(size))
    task.model.train()
    return Made(model=task.model, batch=batch, loss=lambda *batch: task.loss(task.model, batch))


def measure(name: str, *, strategy: str, capture: str, seconds: float) -> dict[str, Any]:
    """One training of one model in one way."""
    import torch

    import shardwise
    from shardwise import Plan
    from shardwise.hardware.probe_host import HostWatch

    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    made = (make_catalogue if name in FITTED else make_hugging_face)(name, device="cuda")
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-4, fused=True)
    shardwise.prepare(made.model, optimizer, Plan(precision="bf16", strategy=strategy, capture=capture))

    def step(*batch: Any) -> Any:
        loss = made.loss(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    lines: list[str] = []
    one = shardwise.capture(step, made.model, optimizer, tell=lines.append)

    def taken() -> Any:
        return one(*made.batch)

    # Replays 1 and 10 are compared with ordinary steps.
    for _ in range(15 if capture != "off" else 5):
        taken()
    peaks = {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "before_bytes": before,
    }
    watch = HostWatch(torch.device("cuda", 0))
    found = _timed(taken, watch=watch, seconds=seconds)
    if capture == "off":
        found["issue_seconds"] = _issued(_phases(made, optimizer))
    if name not in FITTED and (strategy, capture) == ("fsdp", "off"):
        found["kernels"] = _kernels(taken)
    return {"model": name, "strategy": strategy, "capture": capture, **found, **peaks, "told": lines}


def _phases(made: Made, optimizer: Any) -> tuple[Callable[[], Any], ...]:
    losses: list[Any] = []

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return lambda: losses.append(made.loss(*made.batch)), lambda: losses.pop().backward(), update


def _timed(step: Callable[[], Any], *, watch: Any, seconds: float) -> dict[str, Any]:
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    once = time.perf_counter() - began
    num_steps = max(2, min(12, int(seconds / NUM_BLOCKS / once)))
    blocks = []
    for _ in range(NUM_BLOCKS):
        watch.warm_up()
        for _ in range(TURNS_PER_BLOCK):
            watch.turn()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
        blocks.append((time.perf_counter() - began) / num_steps)
    return {
        "step_seconds": statistics.median(blocks),
        "step_seconds_by_block": blocks,
        "steps_per_block": num_steps,
        "host": watch.speed().to_data(),
    }


def _issued(phases: tuple[Callable[[], Any], ...]) -> dict[str, float]:
    """When the CPU had issued each phase: medians of steps that find the device idle."""
    import torch

    rows = []
    for _ in range(NUM_WATCHED):
        torch.cuda.synchronize()
        marks = [time.perf_counter()]
        for phase in phases:
            phase()
            marks.append(time.perf_counter())
        rows.append([after - before for before, after in pairwise(marks)])
    torch.cuda.synchronize()
    return {phase: statistics.median(column) for phase, column in zip(PHASES, zip(*rows, strict=True), strict=True)}


def _kernels(step: Callable[[], Any]) -> dict[str, list[float]]:
    """Operation → how often it ran in a step, and seconds of the device."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    return {
        event.key: [event.count, event.self_device_time_total * 1e-6]
        for event in profiled.key_averages()
        if event.self_device_time_total > 0
    }


def _child(name: str, connection: Any, seconds: float) -> None:
    """A row for each way, through the connection; None is the end."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    for strategy, capture in FITTED_WAYS if name in FITTED else VALIDATED_WAYS:
        began = time.perf_counter()
        try:
            row = measure(name, strategy=strategy, capture=capture, seconds=seconds)
        except Exception as error:
            row = {"model": name, "strategy": strategy, "capture": capture}
            row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        connection.send(row | {"seconds": round(time.perf_counter() - began, 2)})
    connection.send(None)
    dist.destroy_process_group()


def rows_of(name: str, *, seconds: float, deadline: float) -> Iterator[dict[str, Any]]:
    """From a process of its own, which is ended at the deadline (a time of the monotonic clock)."""
    # Forked: torch and transformers are imported once, and no GPU has been touched yet.
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_child, args=(name, there, seconds))
    process.start()
    there.close()
    try:
        while here.poll(max(deadline - time.monotonic(), 0.0)):
            row = here.recv()
            if row is None:
                break
            yield row
    except EOFError:
        print(f"{name}: the process died", flush=True)
    finally:
        if time.monotonic() > deadline:
            process.kill()
        process.join(timeout=15)
        if process.is_alive():
            process.kill()


def _show(row: dict[str, Any]) -> None:
    what = f"{row['model']:13} {row['strategy']:5} {row['capture']:4}"
    if "error" in row:
        print(what, row["error"], flush=True)
        return
    issue = " ".join(f"{1e3 * seconds:.1f}" for seconds in row.get("issue_seconds", {}).values())
    host = row["host"]
    print(
        f"{what} {1e3 * row['step_seconds']:7.2f} ms, issued {issue or '-':18}, allocated "
        f"{row['allocated_bytes'] / 2**30:.3f}, reserved {row['reserved_bytes'] / 2**30:.3f} GiB; "
        f"add {1e6 * host['dispatch_seconds']['add']['forward']:.1f} µs, share {host['share']:.2f}; {row['seconds']} s",
        *row["told"],
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(ORDER), choices=ORDER)
    parser.add_argument("--seconds", type=float, default=1.2, help="of timed steps per row")
    parser.add_argument("--limit-seconds", type=float, default=200.0, help="stop after this")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit_seconds
    import torch

    import shardwise.engines
    import shardwise.hardware.probe_host  # noqa: F401

    machine = {"torch": torch.__version__, "device": "NVIDIA H200"}
    if any(name not in FITTED for name in options.models):
        import transformers

        # Their modules are imported here, once, and not by every process.
        for name in ("qwen3", "gemma3", "bert", "llama"):
            __import__(f"transformers.models.{name}.modeling_{name}")
        machine["transformers"] = transformers.__version__
    results: dict[str, Any] = {"machine": machine, "command": "python benchmarks/host_probe.py", "rows": []}
    for name in options.models:
        if time.monotonic() > deadline:
            print(f"the time is over: {name} is left out", flush=True)
            continue
        for row in rows_of(name, seconds=options.seconds, deadline=deadline):
            results["rows"].append(row)
            _show(row)
            options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
