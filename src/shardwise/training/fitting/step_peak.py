"""Measures the most bytes of tensors that a rank holds at once in a block of code: the planner's `allocated`.

A GPU's allocator counts them. On a CPU it is what the engine holds before the block plus what the profiler sees
allocated in it, without the scratch memory of kernels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.base.torch_internals.cpu_allocations import LiveBytes
from shardwise.base.vocabulary.categories import HOST
from shardwise.engines import require_engine

_BLOCK = "block"


@dataclass(slots=True, kw_only=True)
class StepPeak:
    """`num_bytes` is set at the end of the block."""

    num_bytes: int = 0


@contextmanager
def step_peak(model: nn.Module, optimizer: Optimizer, *, device: torch.device) -> Iterator[StepPeak]:
    """Measure the peak of this block, in which steps of a prepared model run."""
    found = StepPeak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        found.num_bytes = torch.cuda.max_memory_allocated(device)
        return
    held = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for category, tensor in require_engine(model).held_tensors(optimizer)
        if category != HOST and tensor.device.type == device.type
    }
    with LiveBytes(with_scratch=False) as live, live.phase(_BLOCK):
        yield found
    found.num_bytes = sum(held.values()) + live.peak_bytes(_BLOCK)
