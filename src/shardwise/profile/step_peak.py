"""The most that a rank holds at once in a block of code, in bytes of tensors: what the planner calls allocated.

A GPU's allocator counts by itself. A CPU's does not: there it is what the engine holds before the block, and what the
profiler sees come and go in it, without what a kernel takes for itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shardwise.engine.engine import Engine
from shardwise.engine.out_of_memory.out_of_memory import held_now
from shardwise.profile.cpu_allocations import LiveBytes

_BLOCK = "block"


@dataclass(slots=True, kw_only=True)
class StepPeak:
    """`num_bytes` is there when the block is over."""

    num_bytes: int = 0


@contextmanager
def step_peak(engine: Engine) -> Iterator[StepPeak]:
    found = StepPeak()
    device = engine.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        found.num_bytes = torch.cuda.max_memory_allocated(device)
        return
    held = sum(held_now([engine]).values())
    with LiveBytes(with_scratch=False) as live, live.phase(_BLOCK):
        yield found
    found.num_bytes = held + live.peak_bytes(_BLOCK)
