"""The slices that a rank holds of a prepared model, by full names: to save them, or to fill them."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch.distributed as dist
from torch.optim import Optimizer

from shardwise.engine.core.edited_values import distribute, editing
from shardwise.engine.core.parameters import unguarded
from shardwise.engine.engine import EngineParts
from shardwise.engine.owned_model import OwnedModel, OwnedSlice
from shardwise.engine.prepared.prepared_module import PreparedModule


def held(engine: EngineParts) -> OwnedModel:
    """Return this rank's slices, including those of frozen parameters, and the buffers. Waits for all gathers."""
    model = engine.core.model
    assert isinstance(model, PreparedModule)
    engine.check_between_steps(what="a checkpoint")
    engine.check_state(what="a checkpoint")
    engine.core.wait_gathers()
    first = {id(p): name for flat in engine.core.flats for p, name in zip(flat.params, flat.names, strict=True)}
    with unguarded():
        state = super(PreparedModule, model).state_dict(keep_vars=True)
    slices = _owned_slices(engine)
    return OwnedModel(
        slices=slices,
        stepped=_stepped(engine, slices),
        parameters={
            name: (shape, flat.master_dtype)
            for flat in engine.core.flats
            for name, shape in zip(flat.names, flat.layout.shapes, strict=True)
        },
        buffers={name: value for name, value in state.items() if id(value) not in first},
        aliases={name: first[id(value)] for name, value in state.items() if first.get(id(value), name) != name},
    )


def _owned_slices(engine: EngineParts) -> list[OwnedSlice]:
    slices = []
    for flat in engine.core.flats:
        optim = flat.placement.optim
        copies = flat.groups.replicate if optim.is_sharded else flat.groups.reduce_world
        copy, holders = (0, (dist.get_rank(),)) if optim.is_sharded_across else (copies.index, copies.ranks)
        first = flat.full.part(optim).start
        for part in flat.master.owned:
            start = first + part.start - flat.layout.offsets[part.index]
            slices.append(
                OwnedSlice(
                    name=flat.names[part.index],
                    shape=flat.layout.shapes[part.index],
                    start=start,
                    stop=start + part.stop - part.start,
                    parameter=part.parameter,
                    copy=copy,
                    holders=holders,
                    block=flat.block,
                )
            )
    return slices


def _stepped(engine: EngineParts, slices: list[OwnedSlice]) -> list[OwnedSlice]:
    matrices = engine.owned.matrices.of(None)
    owned = {matrix.name for matrix in matrices}
    unsharded = [
        OwnedSlice(
            name=matrix.name,
            shape=matrix.shape,
            start=0,
            stop=prod(matrix.shape),
            parameter=matrix.unsharded,
            copy=matrix.flat.groups.replicate.index,
            holders=matrix.flat.groups.replicate.ranks,
        )
        for matrix in matrices
        if matrix.unsharded is not None
    ]
    return [*(part for part in slices if part.name not in owned), *unsharded]


def slices_filled(engine: EngineParts) -> None:
    """Distribute new values of the owned slices to all other copies. Collective."""
    distribute(engine.core)


@contextmanager
def edit(engine: EngineParts) -> Iterator[None]:
    """Allow writes into the tensors that the optimizer steps; all copies on all ranks follow. Collective.

        with shardwise.edit(model), torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:      # this rank's slices
                    parameter.mul_(0.9)

    Without it, such a write raises an error if other ranks would keep the old values.
    """
    engine.check_between_steps(what="shardwise.edit")
    engine.core.setting.passes.check_values("shardwise.edit")
    with editing(engine.core):
        yield


def group_names(engine: EngineParts, optimizer: Optimizer) -> list[list[str]]:
    """Return the full names in each param group, including those that this rank holds no part of."""
    owned = engine.owned
    owned.adopt_on_all_ranks(optimizer)
    return owned.group_names[optimizer]
