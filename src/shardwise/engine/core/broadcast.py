"""Values that come from one rank: parameters and buffers when a model is prepared, buffers before each forward."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.base.errors import InvalidData, ShardwiseError
from shardwise.comm.groups.collectives import as_moved
from shardwise.comm.groups.groups import MeshGroups
from shardwise.comm.groups.issued import CollectiveName
from shardwise.engine.core.core_setting import CoreSetting
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.inference_tensors import normal
from shardwise.program import Kind
from shardwise.program.spec import ROOT
from shardwise.program.units.materialize import initialiser, materialize_module

_BUFFERS = CollectiveName(f"{Kind.BROADCAST.value} {ROOT}")


def fill(
    model: nn.Module,
    *,
    flats: list[FlatParams],
    groups: MeshGroups,
    device: torch.device,
    weights: Mapping[str, Tensor] | None = None,
    on_filled: Callable[[FlatParams, int, nn.Parameter, nn.Module], None] | None = None,
) -> None:
    """Put rank 0's values into every rank's buffers, module by module, so that no rank has to hold the model twice.

    The order is that of the modules, as in `materialize`, so a seed gives the same weights either way. Values that
    `weights` has are taken from there; rank 0 asks for each once. `on_filled` is called for each parameter of a module,
    before that becomes a view of its buffer.
    """
    places = {id(p): (flat, index) for flat in flats for index, p in enumerate(flat.params)}
    real: dict[int, Tensor] = {}
    filled: set[int] = set()
    everyone = groups.world.handle
    given = GivenWeights(model, weights or {})
    for path, module in model.named_modules():
        before = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        materialize_module(
            module, path=path, device=device, real=real, initialise=initialiser(model, path), given=given.__contains__
        )
        for name, old in before.items():
            if id(old) in filled:
                continue
            filled.add(id(old))
            parameter = module._parameters[name]
            assert parameter is not None
            flat, index = places[id(old)]
            value = given.value_of(old, default=parameter.detach().to(device).contiguous())
            dist.broadcast(as_moved(value), src=0, group=everyone)
            flat.fill(index, value)
            if on_filled is not None:
                on_filled(flat, index, parameter, module)
            flat.attach(index, parameter)
        for name, old_buffer in buffers.items():
            buffer = module._buffers[name]
            assert buffer is not None
            value = buffer.to(device).contiguous()
            # A copy: the module changes its buffers, and the weights may be somebody's.
            value.copy_(given.value_of(old_buffer, default=value))
            dist.broadcast(as_moved(value), src=0, group=everyone)
            module._buffers[name] = value
    if weights is not None:
        given.raise_alike()


class GivenWeights:
    """Values by name, for a model's parameters and buffers; a tied one may go by any of its names."""

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        self._weights = weights
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        # Held, so that an id stays that of its tensor.
        self._held = [tensor for _, tensor in named]
        self._names = {id(tensor): name for name, tensor in named if name in weights}
        self._failure: str | None = None

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._names

    def value_of(self, tensor: Tensor, *, default: Tensor) -> Tensor:
        """On rank 0, what is given for `tensor`, as the default's dtype on its device; else the default.

        It is not copied where it need not be: `default` may be memory that was never touched. A failure waits until
        all ranks can hear of it.
        """
        if dist.get_rank() != 0 or tensor not in self or self._failure is not None:
            return default
        name = self._names[id(tensor)]
        try:
            found = self._weights[name]
            if found.shape != default.shape:
                raise InvalidData(f"{name} has shape {tuple(found.shape)} there, {tuple(default.shape)} in the model")
            return found.detach().to(default.device, default.dtype).contiguous()
        except Exception as error:
            self._failure = str(error) if isinstance(error, ShardwiseError | OSError) else repr(error)
            return default

    def raise_alike(self) -> None:
        """On all ranks, what failed on rank 0. Collective."""
        box = [self._failure]
        dist.broadcast_object_list(box, src=0)
        if box[0] is not None:
            raise InvalidData(f"the weights were not loaded: {box[0]}")


def broadcast_buffers(model: nn.Module, *, setting: CoreSetting) -> None:
    """Take buffers that training changes from the rank whose buffers count, with one collective per dtype."""
    group, source = setting.groups.world, setting.passes.source
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                # An evaluation may have replaced it.
                by_dtype.setdefault(buffer.dtype, []).append(normal(buffer))
    # All of them before the first is sent: memory may run out, and then it is unknown what was issued.
    flats = [torch.cat([buffer.reshape(-1) for buffer in buffers]) for buffers in by_dtype.values()]
    for buffers, flat in zip(by_dtype.values(), flats, strict=True):
        group.log.name = _BUFFERS
        setting.collectives.broadcast(flat, source=source, group=group).wait()
        parts = torch.split(flat, [buffer.numel() for buffer in buffers])
        torch._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)])
    if by_dtype:
        setting.tape.record(Kind.BROADCAST, ROOT)
