"""Passes without reduction, and uneven counts, on torch's own engine."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shardwise.engine.prepared.uneven import summed


@contextmanager
def accumulate_on_torch(model: nn.Module, *, enabled: bool = True) -> Iterator[None]:
    """DDP's `no_sync`, `fully_shard`'s `set_requires_gradient_sync(False)`. The forward has to run in here too."""
    if not enabled:
        yield
    elif isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)


def mean_count_on_torch(model: nn.Module, count: float) -> float:
    device = next(model.parameters()).device
    return summed(count, device=device) / dist.get_world_size()
