"""Values that come from one rank: parameters and buffers when a model is prepared, buffers before each forward."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.comm.collectives import Collectives
from shardwise.comm.groups import MeshGroups
from shardwise.comm.issued import CollectiveName
from shardwise.engine.params.flat import FlatParams
from shardwise.engine.tape import Tape
from shardwise.materialize import materialize_module
from shardwise.program import Kind
from shardwise.spec import ROOT

_BUFFERS = CollectiveName(f"{Kind.BROADCAST.value} {ROOT}")


def fill(model: nn.Module, *, flats: list[FlatParams], groups: MeshGroups, device: torch.device) -> None:
    """Rank 0's values into every rank's buffers, module by module, so that no rank need hold the model twice.

    The order is that of the modules, as in `materialize`, so a seed gives the same weights either way.
    """
    places = {id(p): (flat, index) for flat in flats for index, p in enumerate(flat.params)}
    real: dict[int, Tensor] = {}
    filled: set[int] = set()
    everyone = groups.reduce_world.handle
    for path, module in model.named_modules():
        before = {name: id(parameter) for name, parameter in module._parameters.items() if parameter is not None}
        materialize_module(module, path=path, device=device, real=real)
        for name, key in before.items():
            if key in filled:
                continue
            filled.add(key)
            parameter = module._parameters[name]
            assert parameter is not None
            flat, index = places[key]
            value = parameter.detach().to(device).contiguous()
            dist.broadcast(value, src=0, group=everyone)
            flat.fill(index, value)
            flat.attach(index, parameter)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                value = buffer.to(device).contiguous()
                dist.broadcast(value, src=0, group=everyone)
                module._buffers[name] = value


def broadcast_buffers(
    model: nn.Module, *, source: int, groups: MeshGroups, collectives: Collectives, tape: Tape
) -> None:
    """Buffers that training changes come from one rank, one collective a dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        groups.reduce_world.log.name = _BUFFERS
        collectives.broadcast(flat, source=source, group=groups.reduce_world).wait()
        parts = torch.split(flat, [buffer.numel() for buffer in buffers])
        torch._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)])
    if by_dtype:
        tape.record(Kind.BROADCAST, ROOT)
