"""Evaluation in which ranks may run different numbers of forwards."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import nn

from shardwise.engine.engine import engine_of

_NAME = "shardwise.evaluating(model)"


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Allow each rank to run the model without gradients any number of times. Collective at both ends of the block.

        with shardwise.evaluating(model), torch.no_grad():
            for batch in loader:      # more batches on some ranks than on others
                model(batch)

    A gather of sharded parameters needs every rank. So before each gather the ranks exchange which unit each of them
    needs next, and all take part; a rank that has reached the end of the block takes part until all have
    (engine/core/first_forward.py). Without sharded parameters it costs nothing.
    """
    core = engine_of(model).core
    core.setting.passes.check_values(_NAME)
    core.wait_gathers()
    core.setting.passes.values_by = f"`with {_NAME}:`"
    try:
        with core.evaluation.agreeing(_NAME) if core.followed.any_sharded else nullcontext():
            yield
    finally:
        core.setting.passes.values_by = ""
