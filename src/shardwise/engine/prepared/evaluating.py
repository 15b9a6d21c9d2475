"""Evaluation in which each rank runs as many forwards as it likes."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import nn

from shardwise.engine.engine import engine_of

_NAME = "shardwise.evaluating(model)"


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In here each rank may run the model without gradients as often as it likes. Collective, on both ends.

        with shardwise.evaluating(model), torch.no_grad():
            for batch in loader:      # more batches on some ranks than on others
                model(batch)

    Where parameters are sharded a gather needs every rank. So the ranks tell each other before each gather what they
    want next, and all take part; one that has come to the end of the block goes on taking part until all have
    (engine/core/first_forward.py). Without sharded parameters it costs nothing.
    """
    core = engine_of(model).core
    core.passes.check_values(_NAME)
    core.wait_gathers()
    core.passes.values_by = f"`with {_NAME}:`"
    try:
        with core.evaluation.agreeing(_NAME) if core.any_sharded else nullcontext():
            yield
    finally:
        core.passes.values_by = ""
