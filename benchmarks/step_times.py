"""Step times of several models on one device, one rank: what the planner's predictions are compared with.

    python benchmarks/step_times.py --case cuda --out benchmarks/results/step_times_h200.json
    python benchmarks/step_times.py --case cpu                                     tiny models, to try it

Ours (eager and captured) and torch's own engines, bf16, fused AdamW, two batch sizes, with and without recomputation.
A step's time is that of a block of steps, issued one after the other, by the number of steps; the median of blocks.
With each block, `host_seconds`: what the CPU needs at that moment to issue a fixed number of tiny operations. Where
blocks differ by more than 3%, the case is measured again, from the model's making on, after all others had their turn,
and again until the time is over: what disturbs the host does so for seconds, and a few blocks in a row do not show it.
Also, from steps that are waited for one by one: when the CPU had issued forward, backward and update
(`issue_seconds`), and how long the device took for each (`device_seconds`).
A case that fails is a row with its error. The file is written after every case.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_step import circumstances
from memory_cases import Case as MemoryCase
from memory_worker import make_batch, make_optimizer, task_and_plan
from step_cases import MODELS, Case, all_cases

from shardwise.engines import capture, prepare

WARM_STEPS = 4
NUM_BLOCKS = 4
NUM_WATCHED = 3
# Blocks that differ by more are not trusted yet.
STEADY = 0.03
NUM_TINY = 1000
PHASES = ("forward", "backward", "update")

Phase = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A step as one call, and in its phases; a captured step has none."""

    step: Phase
    phases: tuple[Phase, ...]


def make_training(case: Case, *, device: torch.device) -> Training:
    task, plan = task_and_plan(case, captured=case.captured)
    model, optimizer = prepare(task.model, make_optimizer("adamw-fused", task.model), plan, device=str(device))
    described = MemoryCase(
        model=case.model, strategy=case.strategy, num_ranks=1, batch=case.batch, seq=case.seq, image=case.image
    )
    batch = make_batch(task.make_batch(case.batch), case=described, device=str(device))
    if case.captured:

        def whole(*batch: torch.Tensor) -> torch.Tensor:
            loss = task.loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        captured = capture(whole, model, optimizer)
        return Training(step=lambda: captured(*batch), phases=())
    losses: list[torch.Tensor] = []

    def forward() -> None:
        losses.append(task.loss(model, batch))

    def backward() -> None:
        losses.pop().backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    phases = (forward, backward, update)
    return Training(step=lambda: [phase() for phase in phases] and None, phases=phases)


def measure(case: Case, *, device: torch.device, seconds: float) -> dict[str, Any]:
    """Blocks of as many steps as are done in about `seconds`, all together."""
    finish = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None
    training = make_training(case, device=device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    # The first and the tenth replay are compared with ordinary steps.
    for _ in range(max(WARM_STEPS, 13) if case.captured else WARM_STEPS):
        training.step()
    finish()
    began = time.perf_counter()
    training.step()
    finish()
    once = time.perf_counter() - began
    num_steps = max(2, min(25, int(seconds / NUM_BLOCKS / once)))
    blocks, busy, host = [], [], []
    for _ in range(NUM_BLOCKS):
        gc.collect()
        finish()
        host.append(issue_tiny(device))
        finish()
        began, on_cpu = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            training.step()
        finish()
        blocks.append((time.perf_counter() - began) / num_steps)
        busy.append((time.process_time() - on_cpu) / num_steps)
    found = {
        "step_seconds_by_block": blocks,
        "cpu_seconds_by_block": busy,
        "host_seconds_by_block": host,
        "steps_per_block": num_steps,
        **(watched(training, device=device, finish=finish) if training.phases else {}),
    }
    if device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return found


def issue_tiny(device: torch.device) -> float:
    """Seconds of the CPU to issue operations that take the device next to no time."""
    tensor = torch.ones(8, device=device)
    began = time.perf_counter()
    for _ in range(NUM_TINY):
        tensor.add_(1.0)
    return time.perf_counter() - began


def is_steady(row: dict[str, Any]) -> bool:
    blocks = row.get("step_seconds_by_block")
    return blocks is None or max(blocks) / min(blocks) - 1 < STEADY


def with_again(row: dict[str, Any], again: dict[str, Any]) -> dict[str, Any]:
    """A row with the blocks of another time as well; the rest stays."""
    merged = {name: row[name] + again.get(name, []) for name in row if name.endswith("_by_block")}
    return summed_up({**row, **merged, "seconds": round(row["seconds"] + again["seconds"], 2)})


def summed_up(row: dict[str, Any]) -> dict[str, Any]:
    if row["error"]:
        return row
    medians = {name: statistics.median(row[f"{name}_by_block"]) for name in ("step_seconds", "cpu_seconds")}
    return row | medians


def watched(training: Training, *, device: torch.device, finish: Phase) -> dict[str, Any]:
    """Medians by phase: the CPU's seconds to issue it, and the device's to do it."""
    issued: list[list[float]] = []
    done: list[list[float]] = []
    for _ in range(NUM_WATCHED):
        finish()
        marks = [time.perf_counter()]
        events = []
        if device.type == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(len(PHASES) + 1)]
            events[0].record()
        for number, phase in enumerate(training.phases):
            phase()
            marks.append(time.perf_counter())
            if events:
                events[number + 1].record()
        finish()
        issued.append([after - before for before, after in pairwise(marks)])
        if events:
            done.append([one.elapsed_time(other) / 1e3 for one, other in pairwise(events)])
    found = {"issue_seconds": _by_phase(issued)}
    return found | ({"device_seconds": _by_phase(done)} if done else {})


def _by_phase(times: list[list[float]]) -> dict[str, float]:
    return {phase: statistics.median(column) for phase, column in zip(PHASES, zip(*times, strict=True), strict=True)}


def row_of(case: Case, *, device: torch.device, found: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row of a case. What goes wrong with it is its error, and no reason to stop."""
    began = time.perf_counter()
    row: dict[str, Any] = asdict(case) | {"error": None}
    try:
        row |= found()
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    # Outside of the handler, where the traceback no longer holds the tensors of the frames it passed.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return row | {"seconds": round(time.perf_counter() - began, 2)}


def report(row: dict[str, Any], case: Case) -> None:
    if row["error"]:
        print(f"{case}  {row['error']}  ({row['seconds']} s)", flush=True)
        return
    issue = sum(row.get("issue_seconds", {}).values())
    line = f"{case}  {1e3 * row['step_seconds']:8.2f} ms, issued in {1e3 * issue:7.2f} ms"
    print(f"{line}  ({row['seconds']} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", required=True, choices=MODELS)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--limit-seconds", type=float, default=280.0, help="begin nothing after this")
    parser.add_argument("--go-on", type=Path, help="a result, to whose unsteady cases more blocks are added")
    parser.add_argument("--seconds", type=float, default=1.0, help="of measured steps, a case and turn")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if options.case == "cuda" else torch.device("cpu")
    results: dict[str, Any] = {**circumstances(), "rows": []}
    if options.go_on is not None:
        before = json.loads(options.go_on.read_text())
        results |= {"rows": before["rows"], "command": f"{before['command']}; {results['command']}"}
    with one_rank(device):
        began = time.monotonic()
        cases = list(all_cases(options.case))
        rows = results["rows"]
        waiting = [number for number in range(len(cases)) if number >= len(rows) or not is_steady(rows[number])]
        while waiting:
            for number in waiting:
                if time.monotonic() - began > options.limit_seconds:
                    print(f"the time is over: {len(cases) - len(results['rows'])} cases are left out", file=sys.stderr)
                    return
                find = partial(measure, cases[number], device=device, seconds=options.seconds)
                row = row_of(cases[number], device=device, found=find)
                if number < len(results["rows"]):
                    results["rows"][number] = with_again(results["rows"][number], row)
                else:
                    results["rows"].append(summed_up(row))
                report(results["rows"][number], cases[number])
                if options.out is not None:
                    options.out.write_text(json.dumps(results, indent=1) + "\n")
            waiting = [number for number in waiting if not is_steady(results["rows"][number])]


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """A job of this process alone."""
    os.environ.update(NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder, "store")), 1)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
