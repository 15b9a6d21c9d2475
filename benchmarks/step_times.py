"""Step times of several models on one device, one rank: what the planner's predictions are compared with.

    python benchmarks/step_times.py --case cuda --out benchmarks/results/step_times_h200.json
    python benchmarks/step_times.py --case probe --out benchmarks/results/host_probe_h200.json     about three minutes
    python benchmarks/step_times.py --case cpu                                     tiny models, to try it

cuda    catalogue models, ours (with capture = "off") and torch's own engines, two batch sizes, with and without
        recomputation
probe   ours with the host probe, for fit_overhead.py: catalogue models that the CPU bounds, which are fitted to, and
        Hugging Face models, which are only predicted, eager and with units as CUDA graphs

bf16, fused AdamW. A step's time is that of a block of steps, issued one after the other, by the number of steps; the
median of blocks. In `probe`, turns of the host probe alternate with blocks: a shared host is not the same from one
second to the next. In `cuda`, cases whose blocks differ by more than 3% are measured again, after all others had their
turn, until the time is over: what disturbs the host does so for seconds, and a few blocks in a row do not show it.
`issue_seconds`: when the CPU had issued forward, backward and update, of steps that find the device idle. A case that
fails is a row with its error. The file is written after every case.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hugging_face_models import MODELS as HUGGING_FACE
from measuring import circumstances, free, join_alone, one_line, peaks, seconds_per_step, settle, write
from training_case import Case, Training, set_up

from shardwise.hardware.measuring.probe_host import HostWatch

WARM_STEPS = 5
# Until units are replayed.
WARM_GRAPH_STEPS = 15
NUM_BLOCKS = {"cuda": 4, "cpu": 4, "probe": 6}
MOST_STEPS = {"cuda": 25, "cpu": 25, "probe": 12}
TURNS_PER_BLOCK = 2
NUM_WATCHED = 3
# Blocks that differ by more are not trusted yet.
STEADY = 0.03
PHASES = ("forward", "backward", "update")

# The smaller batch of each model, and the larger one.
_SMALL = (
    Case(model="gpt2-124m", batch=4, seq=1024),
    Case(model="gpt-1.3b", batch=2, seq=2048),
    Case(model="llama-3.2-1b", batch=1, seq=2048),
    Case(model="vit-large", batch=16, image=224),
    Case(model="resnet50", batch=32, image=224),
)
_LARGE = tuple(replace(case, batch=batch) for case, batch in zip(_SMALL, (16, 8, 4, 64, 128), strict=True))
_TINY = (
    Case(model="gpt-tiny", batch=2, seq=64, precision="fp32"),
    Case(model="llama-tiny", batch=2, seq=64, precision="fp32"),
    Case(model="vit-digits", batch=8, image=8, precision="fp32"),
    Case(model="resnet-digits", batch=8, image=8, precision="fp32"),
)
FITTED = {case.model: case for case in _SMALL if case.model != "gpt-1.3b"}
VALIDATED = {name: Case(model=name, batch=known.samples, seq=known.tokens) for name, known in HUGGING_FACE.items()}
# What is tried of each case, most important first.
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"engine": "torch"},
    {"engine": "torch", "strategy": "ddp"},
    {"recompute": "full"},
    {"strategy": "ddp"},
    {"recompute": "full", "engine": "torch"},
)
# Fitted and validated in turn, so that a slower minute does not come to one kind alone.
_PROBED = (
    *("gpt2-124m", "qwen3-0.6b", "vit-large", "bert-large"),
    *("gemma3-1b", "resnet50", "llama-1b", "llama-3.2-1b"),
)


def cases_of(kind: str) -> Iterator[Case]:
    if kind == "probe":
        for name in _PROBED:
            for strategy in ("ddp", "fsdp") if name in FITTED else ("fsdp", "ddp"):
                for how in ("off",) if name in FITTED else ("off", "auto"):
                    yield replace((FITTED | VALIDATED)[name], strategy=strategy, capture=how)
        return
    for way in WAYS:
        for case in (*_SMALL, *_LARGE) if kind == "cuda" else _TINY:
            yield replace(case, **way)


def measure(case: Case, *, kind: str, seconds: float) -> dict[str, Any]:
    """Measure blocks of as many steps as are done in about `seconds`, all together."""
    device = "cpu" if kind == "cpu" else "cuda"
    training = set_up(case, device=device, made_on="cuda" if kind == "probe" else "meta")
    step = training.step
    if kind == "cuda":
        torch.cuda.empty_cache()
    for _ in range(WARM_GRAPH_STEPS if case.has_graphs else WARM_STEPS):
        step()
    memory = peaks()
    watch = HostWatch(torch.device("cuda", 0)) if kind == "probe" else None
    once = seconds_per_step(step, num_steps=1)
    num_steps = max(2, min(MOST_STEPS[kind], int(seconds / NUM_BLOCKS[kind] / once)))
    blocks = []
    for _ in range(NUM_BLOCKS[kind]):
        if watch is not None:
            watch.warm_up()
            for _ in range(TURNS_PER_BLOCK):
                watch.turn()
        blocks.append(seconds_per_step(step, num_steps=num_steps))
    return {
        "step_seconds_by_block": blocks,
        "steps_per_block": num_steps,
        **({} if watch is None else {"host": watch.speed().to_data()}),
        **({} if case.has_graphs else {"issue_seconds": issued(training)}),
        **memory,
    }


def issued(training: Training) -> dict[str, float]:
    """Return the CPU's seconds to issue each phase: medians of steps that find the device idle."""
    losses: list[Any] = []
    phases: tuple[Callable[[], Any], ...] = (
        lambda: losses.append(training.loss(*training.batch)),
        lambda: losses.pop().backward(),
        training.update,
    )
    rows = []
    for _ in range(NUM_WATCHED):
        settle()
        marks = [time.perf_counter()]
        for phase in phases:
            phase()
            marks.append(time.perf_counter())
        rows.append([after - before for before, after in pairwise(marks)])
    settle()
    return {phase: statistics.median(column) for phase, column in zip(PHASES, zip(*rows, strict=True), strict=True)}


def row_of(case: Case, *, kind: str, seconds: float) -> dict[str, Any]:
    """Return the row of a case. What goes wrong with it is its error, and no reason to stop."""
    began = time.perf_counter()
    row: dict[str, Any] = case.as_data() | {"error": None}
    try:
        row |= measure(case, kind=kind, seconds=seconds)
    except Exception as error:
        row["error"] = one_line(error)
    # Outside of the handler, where the traceback no longer holds the tensors of the frames it passed.
    free()
    return row | {"seconds": round(time.perf_counter() - began, 2)}


def is_steady(row: dict[str, Any]) -> bool:
    blocks = row.get("step_seconds_by_block")
    return blocks is None or max(blocks) / min(blocks) - 1 < STEADY


def with_more(row: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the blocks of another time as well; the rest stays."""
    if row["error"]:
        return row
    blocks = row["step_seconds_by_block"] + more.get("step_seconds_by_block", [])
    return row | {"step_seconds_by_block": blocks, "step_seconds": statistics.median(blocks)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=NUM_BLOCKS)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--limit-seconds", type=float, default=280.0, help="begin nothing after this")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of measured steps per case and turn")
    asked = parser.parse_args()
    join_alone("cpu" if asked.case == "cpu" else "cuda")
    torch.set_num_threads(1)
    deadline = time.monotonic() + asked.limit_seconds
    cases, rows = list(cases_of(asked.case)), {}
    waiting = list(range(len(cases)))
    while waiting and time.monotonic() < deadline:
        for number in waiting:
            if time.monotonic() > deadline:
                break
            row = row_of(cases[number], kind=asked.case, seconds=asked.seconds)
            rows[number] = row = with_more(rows.get(number, row), row if number in rows else {})
            time_found = row["error"] or f"{1e3 * row['step_seconds']:8.2f} ms"
            print(f"{cases[number]}  {time_found}  ({row['seconds']} s)", flush=True)
            write(asked.out, {**circumstances(), "rows": [rows[number] for number in sorted(rows)]})
        waiting = [number for number in waiting if number in rows and not is_steady(rows[number])]
        waiting = [] if asked.case == "probe" else waiting
    dist.destroy_process_group()
    if len(rows) < len(cases):
        print(f"the time is over: {len(cases) - len(rows)} cases are left out", file=sys.stderr)


if __name__ == "__main__":
    main()
