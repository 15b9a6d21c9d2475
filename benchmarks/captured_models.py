"""Hugging Face models, eager and with units as CUDA graphs, on one GPU: `python benchmarks/captured_models.py`.

For each: the median time of a step, the time in which the GPU was busy with kernels in one step, and memory. Weights
are random; bf16, fused AdamW, `fsdp` on one NCCL rank. Each model runs in a process of its own, first eager, then with
graphs; with `--compile inductor` units are compiled in both. Writes
benchmarks/results/captured_models_h200.json; rows of other models, and of the other way to compile, are kept.

    allocated_bytes, reserved_bytes   peaks of the training: warm-up, recordings and replays
    mixed_…                           peaks of all that, and then of steps with a padded batch, of half the tokens
                                      (other graphs), and evaluations under no_grad, all in between
    other_device_bytes                in use on the device at the end besides what is reserved: context, graphs
"""

import statistics
from collections.abc import Callable
from typing import Any

import measuring
import torch
import torch.distributed as dist
import workers
from hugging_face_models import MODELS, build
from hugging_face_peers import WARM_UP, step_of
from measuring import RESULTS, peaks
from torch.profiler import ProfilerActivity, profile

from shardwise.training.loop.compile_clock import CompileClock


def measure(name: str, *, capture: str, backend: str, num_steps: int) -> dict[str, Any]:
    """Train one model, and measure its steps once they are warm."""
    model, ids, mask = build(name)
    engine = ("fsdp" if capture == "off" else "default") + (" compiled" if backend == "inductor" else "")
    taken = step_of(engine, model)
    # The first step may compile.
    with CompileClock() as clock:
        for _ in range(WARM_UP):
            loss = taken(ids, mask)
    seconds = [measuring.seconds_per_step(lambda: taken(ids, mask), num_steps=num_steps) for _ in range(5)]
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
        "other_device_bytes": measuring.used_bytes() - torch.cuda.memory_reserved(),
        "loss": loss.item(),
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


def busy_seconds(step: Callable[[], Any]) -> float:
    """Return the time in which at least one kernel or copy ran, in one step."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    events = [event for event in profiled.events() if event.device_type.name == "CUDA"]
    busy, end = 0.0, 0.0
    for start, stop in sorted((event.time_range.start, event.time_range.end) for event in events):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy * 1e-6


def main() -> None:
    out = RESULTS / "captured_models_h200.json"
    asked = measuring.options(__doc__, models=list(MODELS), steps=8, compile="none", out=out, here="")
    if asked.here:
        measuring.join_alone("cuda")
        for capture in ("off", "auto"):
            workers.tell(measure(asked.here, capture=capture, backend=asked.compile, num_steps=asked.steps))
            measuring.free()
        dist.destroy_process_group()
        return
    options = ["--steps", str(asked.steps), "--compile", asked.compile]
    for name, rows in workers.in_processes(__file__, asked.models, *options, limit_seconds=150):
        for row in rows:
            measuring.show(name, row)
        measuring.replace_rows(asked.out, rows, key=lambda row: (row["model"], row["compile"]))


if __name__ == "__main__":
    main()
