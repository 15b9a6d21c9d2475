"""Streams a model's weights one after the other, unsharded on every rank: for an inference engine, for example."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardwise.comm.groups.agreement import meet
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.engine import EngineParts, engine_of
from shardwise.engine.owned_model import OwnedModel
from shardwise.engine.prepared.slices import held

_NAME = "`for … in shardwise.weight_stream(model):`"


def weight_stream(engine: EngineParts, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of the whole state dict, unit after unit in the order of a step. Collective.

        for name, tensor in shardwise.weight_stream(model, dtype=torch.bfloat16):      # on every rank, to the end
            if rank == 0:
                inference.load_weights([(name, tensor)])

    One unit is gathered at a time, so it takes the memory of two units at most (the one that the loop still holds, and
    the next), not of the model. With `dtype`, floating-point tensors are cast before they are sent; without it they
    have full precision. No step inside; a rank that stops before the end is named to the others.
    """
    passes = engine.core.setting.passes
    engine.check_between_steps(what="shardwise.weight_stream")
    found = held(engine)
    before, passes.values_by = passes.values_by, _NAME
    try:
        for name in _in_order(engine):
            flats = engine.core.units[name].flats
            if not all(flat.holds_all for flat in flats):
                # Names a rank that has stopped iterating, instead of waiting for it.
                meet(f"shardwise.weight_stream at {name}", limit_seconds=engine.core.followed.limit_seconds)
            for flat in flats:
                yield from _named(flat, flat.full_master(dtype=_wanted(flat.master.values, dtype)), found)
        for name, value in found.buffers.items():
            # A module's extra state is not a weight.
            if not isinstance(value, Tensor):
                continue
            yield name, value.detach().to(_wanted(value, dtype), copy=True)
    finally:
        passes.values_by = before


def full_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full parameter) in the order of `held(model).parameters`, at the caller's pace. Collective."""
    for flat in engine_of(model).core.flats:
        # The buffer is freed before the next one is gathered, if the caller holds no view of it.
        yield from zip(flat.names, flat.full.views_of(flat.full_master()), strict=True)


def _in_order(engine: EngineParts) -> list[str]:
    """Return the units in the order in which a step calls them, then those that it does not call."""
    return list(dict.fromkeys((*engine.core.followed.spec.call_order, *engine.core.units)))


def _named(flat: FlatParams, gathered: Tensor, found: OwnedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter of a buffer under all its names."""
    for name, view in zip(flat.names, flat.full.views_of(gathered), strict=True):
        for known in (name, *(alias for alias, first in found.aliases.items() if first == name)):
            yield known, view


def _wanted(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a tensor is yielded; integers keep theirs."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
