"""The state that this rank holds of any model: prepared by an engine, or plain in one process."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from torch import Tensor, nn

from shardwise.base.errors import CheckpointError
from shardwise.engine.owned_model import OwnedModel, OwnedSlice
from shardwise.engine.torch_engine.plain_model import state_of
from shardwise.state.checkpoint.padded_rows import vocabularies


def holding(model: nn.Module) -> OwnedModel:
    """Return this rank's slices and the buffers, by full names.

    An embedding or a head has only the rows of the vocabulary: a checkpoint does not depend on their padding.
    """
    state = state_of(model)
    found = _without_padding(state.held(), vocabularies(state.bare))
    for name, value in found.buffers.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name} is a {type(value).__name__}, not a tensor: a module's extra state is not saved"
            )
    return found


def _without_padding(found: OwnedModel, num_rows: Mapping[str, int]) -> OwnedModel:
    """Cut off the rows past `num_rows`: they are the last elements of a parameter, so its slices end earlier."""

    def shape_of(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (num_rows[name], *shape[1:]) if name in num_rows else shape

    def cut(part: OwnedSlice) -> OwnedSlice:
        shape = shape_of(part.name, part.shape)
        return replace(part, shape=shape, start=min(part.start, prod(shape)), stop=min(part.stop, prod(shape)))

    slices, stepped = list(map(cut, found.slices)), list(map(cut, found.stepped))
    parameters = {name: (shape_of(name, shape), dtype) for name, (shape, dtype) in found.parameters.items()}
    return replace(found, slices=slices, stepped=stepped, parameters=parameters)
