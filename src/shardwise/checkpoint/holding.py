"""What this rank holds of any model: prepared by our engine, on torch's own, or plain in one process."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise.comm.dtensor import dtensor_types, local_part
from shardwise.engine.engine import is_prepared
from shardwise.engine.prepared.slices import OwnedModel, OwnedSlice, group_names, held, slices_filled
from shardwise.errors import CheckpointError
from shardwise.models.layers import vocabularies


def holding(model: nn.Module) -> OwnedModel:
    """The model by full names: this rank's slices, and the buffers.

    Of an embedding or a head, the rows of the vocabulary alone: a checkpoint does not depend on how they are padded.
    """
    found = _without_padding(held(model) if is_prepared(model) else _held_by_torch(model), vocabularies(_bare(model)))
    for name, value in found.buffers.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name} is a {type(value).__name__}, not a tensor: a module's extra state is not saved"
            )
    return found


def _without_padding(found: OwnedModel, num_rows: Mapping[str, int]) -> OwnedModel:
    """The rows past `num_rows` are the last elements of a parameter: its slices just end earlier."""

    def shape_of(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (num_rows[name], *shape[1:]) if name in num_rows else shape

    def cut(part: OwnedSlice) -> OwnedSlice:
        shape = shape_of(part.name, part.shape)
        return replace(part, shape=shape, start=min(part.start, prod(shape)), stop=min(part.stop, prod(shape)))

    slices, stepped = list(map(cut, found.slices)), list(map(cut, found.stepped))
    parameters = {name: (shape_of(name, shape), dtype) for name, (shape, dtype) in found.parameters.items()}
    return replace(found, slices=slices, stepped=stepped, parameters=parameters)


def filled(model: nn.Module) -> None:
    """New values have come into the slices. Collective."""
    if is_prepared(model):
        slices_filled(model)


def names_of_groups(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The full names of the parameters in each param group."""
    if is_prepared(model):
        return group_names(model, optimizer)
    bare = _bare(model)
    # First: it makes fully_shard put its shards back in place of what a forward has gathered.
    bare.state_dict(keep_vars=True)
    names = {id(parameter): name for name, parameter in bare.named_parameters()}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if id(parameter) not in names:
            raise CheckpointError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the model's"
            )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def local(tensor: Tensor) -> Tensor:
    """What of a tensor lies on this rank."""
    return local_part(tensor).detach()


def _held_by_torch(model: nn.Module) -> OwnedModel:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        from shardwise.torch_engine.prepare import check_on_torch

        check_on_torch(model)
    bare = _bare(model)
    # First: it makes fully_shard put its shards back in place of what a forward has gathered.
    state = bare.state_dict(keep_vars=True)
    first = {id(parameter): name for name, parameter in bare.named_parameters()}
    slices = [_slice(name, parameter) for name, parameter in bare.named_parameters()]
    return OwnedModel(
        slices=slices,
        stepped=slices,
        parameters={name: (tuple(p.shape), p.dtype) for name, p in bare.named_parameters()},
        buffers={name: value for name, value in state.items() if id(value) not in first},
        aliases={name: first[id(value)] for name, value in state.items() if first.get(id(value), name) != name},
    )


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _slice(name: str, parameter: nn.Parameter) -> OwnedSlice:
    """All of a parameter, or the rows that `fully_shard` left here: either way one stretch of its elements."""
    shape = tuple(parameter.shape)
    start, stop = 0, prod(shape)
    copy, num_copies = 0, 1
    if isinstance(parameter, dtensor_types()):
        (chunk,) = parameter.__create_chunk_list__()
        if tuple(chunk.sizes[1:]) != shape[1:]:
            raise CheckpointError(f"{name} is sharded in another dimension than its first, which is not supported")
        row = prod(shape[1:])
        start, stop = chunk.offsets[0] * row, (chunk.offsets[0] + chunk.sizes[0]) * row
        mesh = parameter.device_mesh
        if mesh.ndim == 2:
            copy, num_copies = mesh.get_local_rank(0), mesh.size(0)
    elif dist.is_available() and dist.is_initialized():
        copy, num_copies = dist.get_rank(), dist.get_world_size()
    return OwnedSlice(
        name=name, shape=shape, start=start, stop=stop, parameter=parameter, copy=copy, num_copies=num_copies
    )
