"""The state of a torch module whose tensors are held by torch alone: on torch's engines, or without an engine."""

import weakref
from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardwise.base.errors import CheckpointError, InvalidModel
from shardwise.base.vocabulary.categories import GRADS, OPTIM, OTHER, PARAMS
from shardwise.comm.groups.dtensor import dtensor_types, local_part
from shardwise.engine.carry import find_engine
from shardwise.engine.owned_model import OwnedModel, OwnedSlice
from shardwise.plan import Plan

if TYPE_CHECKING:
    # A model in one process does not need it.
    from shardwise.engine.our_engine import Engine


def state_of(model: nn.Module) -> "Engine | PlainModel":
    """Return the engine of a prepared model, or what reads the tensors of any other model."""
    return find_engine(model) or PlainModel(model)


def is_on_torch(model: nn.Module) -> bool:
    """Return whether one of torch's own engines runs `model`, prepared by us or not."""
    # Imported late: it takes a while, and a model in one process does not need it.
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, DistributedDataParallel | FSDPModule)


class PlainModel:
    """A module with ordinary parameters or DTensors: in one process, or under torch's DDP or `fully_shard`.

    Reads the state that a rank holds by the methods of our engine, which describes them.
    """

    def __init__(self, model: nn.Module, plan: Plan | None = None) -> None:
        self.plan = plan
        # The model carries it: with a reference back, a model that is dropped would stay until a garbage collection.
        self._model = weakref.ref(model)

    def __reduce__(self) -> tuple[Any, ...]:
        """Make the engine of a copied or a loaded model that model's own."""
        return type(self), (self.model, self.plan)

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None
        return model

    @property
    def bare(self) -> nn.Module:
        """Return the user's own module, without a wrapper."""
        model = self.model
        return model.module if isinstance(model, DistributedDataParallel) else model

    def held(self) -> OwnedModel:
        if _in_a_job() and dist.get_world_size() > 1 and not is_on_torch(self.model):
            raise InvalidModel(f"this {type(self.model).__name__} has not been through shardwise.prepare")
        bare = self.bare
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

    def slices_filled(self) -> None:
        """Do nothing: the slices are the model's own memory."""

    def group_names(self, optimizer: Optimizer) -> list[list[str]]:
        bare = self.bare
        # First: it makes fully_shard put its shards back in place of what a forward has gathered.
        bare.state_dict(keep_vars=True)
        names = {id(parameter): name for name, parameter in bare.named_parameters()}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if id(parameter) not in names:
                raise CheckpointError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not the model's"
                )
        return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]

    def check_values(self, *, what: str) -> None:
        """Do nothing: averages are only applied to models of our engine."""

    def listen_to_writes(self, optimizer: Optimizer | None, hear: Callable[..., None]) -> None:
        if optimizer is not None and hear not in optimizer._optimizer_step_pre_hooks.values():
            optimizer.register_step_pre_hook(hear)

    def held_tensors(self, optimizer: Optimizer | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield what the optimizer steps, its gradients and its state. Buffers of torch's engines cannot be found."""
        groups = optimizer.param_groups if optimizer is not None else [{"params": list(self.model.parameters())}]
        for parameter in (parameter for group in groups for parameter in group["params"]):
            yield PARAMS, local_part(parameter)
            if parameter.grad is not None:
                yield GRADS, local_part(parameter.grad)
            for value in (optimizer.state.get(parameter, {}) if optimizer is not None else {}).values():
                if isinstance(value, Tensor):
                    yield OPTIM, local_part(value)
        for buffer in self.model.buffers():
            yield OTHER, buffer


def _in_a_job() -> bool:
    return dist.is_available() and dist.is_initialized()


def _slice(name: str, parameter: nn.Parameter) -> OwnedSlice:
    """Return a whole parameter, or the rows that `fully_shard` left here: either way one range of its elements."""
    shape = tuple(parameter.shape)
    start, stop = 0, prod(shape)
    copy = 0
    holders: tuple[int, ...] = (dist.get_rank() if _in_a_job() else 0,)
    if isinstance(parameter, dtensor_types()):
        (chunk,) = parameter.__create_chunk_list__()
        if tuple(chunk.sizes[1:]) != shape[1:]:
            raise CheckpointError(f"{name} is sharded in another dimension than its first, which is not supported")
        row = prod(shape[1:])
        start, stop = chunk.offsets[0] * row, (chunk.offsets[0] + chunk.sizes[0]) * row
        mesh = parameter.device_mesh
        if mesh.ndim == 2:
            copy, holders = mesh.get_local_rank(0), tuple(mesh.mesh[:, mesh.get_local_rank(1)].tolist())
    elif _in_a_job():
        copy, holders = dist.get_rank(), tuple(range(dist.get_world_size()))
    return OwnedSlice(name=name, shape=shape, start=start, stop=stop, parameter=parameter, copy=copy, holders=holders)
