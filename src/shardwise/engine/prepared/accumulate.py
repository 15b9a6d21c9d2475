"""Several backwards in one step."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from shardwise.engine.engine import engine_of


@contextmanager
def accumulate(model: nn.Module, *, enabled: bool = True) -> Iterator[None]:
    """Do not reduce gradients in this block; the next backward outside of it reduces them all.

    They add up on each rank, in the reduce dtype. If the plan says `accumulate_reduced`, every backward reduces, and
    the averages add up: memory for a slice instead of the unsharded gradient, but more communication.
    """
    passes = engine_of(model).core.setting.passes
    before = passes.accumulating
    passes.accumulating = before or enabled
    try:
        yield
    finally:
        passes.accumulating = before
