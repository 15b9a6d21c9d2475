"""Several backwards in one step."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from shardwise.engine.engine import Engine, engine_of
from shardwise.errors import InvalidModel


@contextmanager
def accumulate(model: nn.Module, *, enabled: bool = True) -> Iterator[None]:
    """A backward in here does not reduce its gradients; the next one outside reduces them all.

    They add up on each rank, in the reduce dtype. Where the plan says `accumulate_reduced`, every backward reduces all
    the same, and it is the averages that add up: a slice of memory instead of the whole, and more communication.
    """
    passes = engine_of(model).runner.passes
    before = passes.accumulating
    passes.accumulating = before or enabled
    try:
        yield
    finally:
        passes.accumulating = before


def refuse_in_the_middle(engine: Engine, *, what: str) -> None:
    """Gradients that are summed on each rank alone are part of no state."""
    if engine.runner.passes.accumulating or engine.runner.executor.holds_grads:
        raise InvalidModel(
            f"{what} in the middle of an accumulation: do it after the step, or clear the gradients first "
            "(optimizer.zero_grad())"
        )
