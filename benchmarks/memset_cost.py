"""What small memsets cost inside CUDA graphs, on one GPU: `PYTHONPATH=src python benchmarks/memset_cost.py bert-large`.

A model of hugging_face_models.py is captured twice: with its memsets as they were recorded, and with kernels in their
place (engine/captured/graph_fills.py). Blocks of steps alternate between both. Prints how many memsets were replaced,
the milliseconds per step, and how long the device did nothing between two of its events, in all and around memsets.
"""

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from captured_models import device_events
from hugging_face_models import build
from hugging_face_peers import WARM_UP, step_of
from measuring import in_turn, join_alone

from shardwise.engine.captured import step_graphs
from shardwise.engine.captured.graph_fills import fill_by_kernels

_FILLS = ("Memset", "shardwise_fill")


def captured(name: str, *, by_kernels: bool) -> tuple[Callable[[], Any], int]:
    """Return a step that is replayed, and how many of its memsets were replaced."""
    replaced = []

    def fill(graph: torch.cuda.CUDAGraph) -> int:
        replaced.append(fill_by_kernels(graph) if by_kernels else 0)
        return replaced[-1]

    step_graphs.fill_by_kernels = fill
    model, *batch = build(name)
    step = step_of("default", model, say=print)
    for _ in range(1 + WARM_UP):
        step(*batch)
    return lambda: step(*batch), sum(replaced)


def idle_seconds(step: Callable[[], Any]) -> tuple[float, float]:
    """Return the idle time between events of the device in one step: in all, and around fills."""
    events = [(start, end, name.startswith(_FILLS)) for start, end, name in device_events(step)]
    idle, around, (_, end, was_fill) = 0.0, 0.0, events[0]
    for start, stop, is_fill in events[1:]:
        gap = max(0.0, start - end)
        idle += gap
        around += gap if is_fill or was_fill else 0.0
        end, was_fill = max(end, stop), is_fill
    return idle * 1e-6, around * 1e-6


def main() -> None:
    join_alone("cuda")
    for name in sys.argv[1:] or ("bert-large", "gemma3-1b", "qwen3-0.6b"):
        found = {way: captured(name, by_kernels=way == "kernels") for way in ("memsets", "kernels")}
        seconds = in_turn({way: step for way, (step, _) in found.items()}, blocks=7)
        for way, (step, replaced) in found.items():
            idle, around = idle_seconds(step)
            print(
                f"{name} {way}: {replaced} replaced, {1e3 * statistics.median(seconds[way]):.2f} ms per step; idle "
                f"{1e3 * idle:.2f} ms, of it {1e3 * around:.2f} around fills",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
