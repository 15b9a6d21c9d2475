"""Hugging Face models, eager and captured, on one GPU: `python benchmarks/captured_models.py`.

For each: the median time of a step, the time in which the GPU was busy with kernels in one step, memory, and what
`capture = "auto"` decided. Weights are random; bf16, fused AdamW, `fsdp` on one NCCL rank. Each model runs in a process
of its own, first eager, then captured; with `--compile inductor` units are compiled in both. Writes
benchmarks/results/captured_models_h200.json; rows of other models, and of the other way to compile, are kept.

    allocated_bytes, reserved_bytes   peaks of the training: warm-up, comparisons and replays
    mixed_…                           peaks of all that, and then of steps with a padded batch (a guard fails), of half
                                      the tokens (other graphs), and evaluations under no_grad, all in between
    other_device_bytes                in use on the device at the end besides what is reserved: context, graphs
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hugging_face_models import MODELS, build
from hugging_face_peers import WARM_UP, step_of
from measuring import (
    RESULTS,
    ProcessFailed,
    circumstances,
    free,
    join_alone,
    output_of,
    peaks,
    results_of,
    seconds_per_step,
    tell,
    used_bytes,
    write,
)
from torch.profiler import ProfilerActivity, profile

from shardwise.engine.captured.compile_clock import CompileClock


def measure(name: str, *, capture: str, backend: str, num_steps: int) -> dict[str, Any]:
    """Train one model, and measure its steps once they are warm."""
    lines: list[str] = []
    model, ids, mask = build(name)
    engine = ("fsdp" if capture == "off" else "default") + (" compiled" if backend == "inductor" else "")
    taken = step_of(engine, model, say=lines.append)
    # The first step may compile.
    with CompileClock() as clock:
        for _ in range(WARM_UP):
            loss = taken(ids, mask)
    seconds = [seconds_per_step(lambda: taken(ids, mask), num_steps=num_steps) for _ in range(5)]
    steady = peaks()
    busy = busy_seconds(lambda: taken(ids, mask))
    mix(model, taken, ids, mask)
    return {
        "model": name,
        "capture": capture,
        "compile": backend,
        "compile_seconds": clock.seconds,
        "step_seconds": statistics.median(seconds),
        "fastest_seconds": min(seconds),
        "slowest_seconds": max(seconds),
        "gpu_busy_seconds": busy,
        **steady,
        **{f"mixed_{key}": value for key, value in peaks().items()},
        "other_device_bytes": used_bytes() - torch.cuda.memory_reserved(),
        "loss": loss.item(),
        "told": lines,
    }


def mix(model: Any, taken: Any, ids: Any, mask: Any) -> None:
    """Run three rounds of what comes in between in a training. The losses of evaluations are kept."""
    padded = mask.clone()
    padded[0, -9:] = 0
    half = ids.shape[1] // 2
    short_ids, short_mask = ids[:, :half].contiguous(), mask[:, :half].contiguous()
    losses = []
    for _ in range(3):
        taken(ids, padded)
        model.eval()
        with torch.no_grad():
            losses += [model(input_ids=ids, attention_mask=mask, labels=ids).loss for _ in range(2)]
        model.train()
        for _ in range(4):
            taken(short_ids, short_mask)
        for _ in range(2):
            taken(ids, mask)
    assert torch.stack(losses).isfinite().all()


def device_events(step: Callable[[], Any]) -> list[tuple[float, float, str]]:
    """Return (start, end, name) of what the device did in one step, in microseconds, in order."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    return sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiled.events()
        if event.device_type.name == "CUDA"
    )


def busy_seconds(step: Callable[[], Any]) -> float:
    """Return the time in which at least one kernel or copy ran, in one step."""
    busy, end = 0.0, 0.0
    for start, stop, _ in device_events(step):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy * 1e-6


def line(eager: dict[str, Any], captured: dict[str, Any]) -> str:
    def both(key: str, *, unit: float) -> str:
        return f"{eager[key] / unit:.2f} and {captured[key] / unit:.2f}"

    return (
        f"eager and captured: {both('step_seconds', unit=1e-3)} ms, GPU busy {both('gpu_busy_seconds', unit=1e-3)}; "
        f"captured / busy eager {captured['step_seconds'] / eager['gpu_busy_seconds']:.3f}; reserved "
        f"{both('reserved_bytes', unit=2**30)} GiB, mixed {both('mixed_reserved_bytes', unit=2**30)}; compiled "
        f"{both('compile_seconds', unit=1)} s {captured['told']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--steps", type=int, default=8, help="steps per block")
    parser.add_argument("--compile", choices=("none", "inductor"), default="none")
    parser.add_argument("--out", type=Path, default=RESULTS / "captured_models_h200.json")
    parser.add_argument("--here", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.here:
        join_alone("cuda")
        for capture in ("off", "auto"):
            tell(measure(asked.here, capture=capture, backend=asked.compile, num_steps=asked.steps))
            free()
        dist.destroy_process_group()
        return
    rows = json.loads(asked.out.read_text())["rows"] if asked.out.exists() else []
    for name in asked.models:
        options = ("--here", name, "--steps", str(asked.steps), "--compile", asked.compile)
        try:
            found = results_of(output_of(__file__, *options, limit_seconds=150))
        except ProcessFailed as error:
            print(error, flush=True)
            continue
        print(f"{name}: {line(*found)}", flush=True)
        rows = [row for row in rows if (row["model"], row["compile"]) != (name, asked.compile)] + found
        # After each: what was measured is kept when time runs out.
        write(asked.out, {**circumstances(), "rows": rows})


if __name__ == "__main__":
    main()
