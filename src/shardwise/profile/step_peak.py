"""Measures the most bytes of tensors that a rank holds at once in a block of code: the planner's `allocated`.

A GPU's allocator counts them. On a CPU it is what the engine holds before the block plus what the profiler sees
allocated in it, without the scratch memory of kernels.
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
    """`num_bytes` is set at the end of the block."""

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
