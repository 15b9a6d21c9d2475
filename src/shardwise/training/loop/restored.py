"""Passes of a step that leave no trace: a rehearsal before training, and the search for the first NaN or Inf."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shardwise.engine.random_states import random_states, restore_random_states


@contextmanager
def restoring(model: nn.Module, *, device: torch.device) -> Iterator[None]:
    """Restore random numbers and buffers (running statistics) afterwards, so that training can continue."""
    states = random_states(device)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        restore_random_states(states, device=device)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
