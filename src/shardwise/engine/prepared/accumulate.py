"""Several backwards in one step."""

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.engine.engine import EngineParts


@contextmanager
def accumulate(engine: EngineParts, *, enabled: bool = True) -> Iterator[None]:
    """Skip the reduction of gradients in this block; the next backward outside reduces them all.

        for number, batch in enumerate(micro_batches):
            with shardwise.accumulate(model, enabled=number + 1 < len(micro_batches)):
                (loss_of(model, batch) / len(micro_batches)).backward()
        optimizer.step()

    The gradients add up on each rank, in the reduce dtype. Under a plan with `accumulate_reduced`, every backward
    reduces, and the averages add up: a slice of memory instead of the whole, and more communication.
    """
    passes = engine.core.setting.passes
    before = passes.accumulating
    passes.accumulating = before or enabled
    try:
        yield
    finally:
        passes.accumulating = before
