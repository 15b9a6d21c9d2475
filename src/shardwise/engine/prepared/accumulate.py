"""Several backwards in one step."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from shardwise.engine.engine import engine_of


@contextmanager
def accumulate(model: nn.Module, *, enabled: bool = True) -> Iterator[None]:
    """A backward in here does not reduce its gradients; the next one outside reduces them all.

    They add up on each rank, in the reduce dtype. Where the plan says `accumulate_reduced`, every backward reduces all
    the same, and it is the averages that add up: a slice of memory instead of the whole, and more communication.
    """
    passes = engine_of(model).core.passes
    before = passes.accumulating
    passes.accumulating = before or enabled
    try:
        yield
    finally:
        passes.accumulating = before
