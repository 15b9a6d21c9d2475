"""Full state dicts: from slices to whole named tensors, and back."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from shardwise.comm.agreement import meet
from shardwise.comm.collectives import own_slice
from shardwise.engine.engine import Engine, engine_of
from shardwise.engine.params.flat import FlatParams
from shardwise.errors import InvalidData
from shardwise.placement import SHARDED


def full_state_dict(
    model: nn.Module, optimizer: Optimizer | None = None, *, rank0_only: bool = False
) -> dict[str, Any]:
    """{"model": names → full tensors, "optimizer": names → full states, and groups}. Collective.

    With `rank0_only`, the other ranks take part and get an empty dict.
    """
    state: dict[str, Any] = {"model": dict(model.state_dict())}
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(engine_of(model), optimizer)
    return {} if rank0_only and dist.get_rank() != 0 else state


def load_full_state_dict(
    model: nn.Module, state: Mapping[str, Any], optimizer: Optimizer | None = None, *, from_rank0: bool = False
) -> None:
    """Load what `full_state_dict` gave, under any plan and number of ranks. Collective.

    With `from_rank0`, only rank 0's `state` is read.
    """
    state = received_state(state, with_optimizer=optimizer is not None, from_rank0=from_rank0)
    model.load_state_dict(state["model"])
    if optimizer is not None:
        _load_optimizer_state(engine_of(model), optimizer, state["optimizer"])


def received_state(state: Mapping[str, Any], *, with_optimizer: bool, from_rank0: bool) -> Mapping[str, Any]:
    """The state to load: this rank's own, or rank 0's; refused where it is not one."""
    if from_rank0:
        box = [state if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box, src=0)
        assert box[0] is not None
        state = box[0]
    if "model" not in state or (with_optimizer and "optimizer" not in state):
        raise InvalidData('this is not a state of shardwise.full_state_dict: it must have "model" (and "optimizer")')
    return state


def full_tensors(engine: Engine, state: Any, *, keep_vars: bool) -> Any:
    """Replace the parameters in a state dict by their full master values; buffers are detached."""
    engine.check_between_steps(what="a state_dict")
    meet("state_dict", limit_seconds=engine.limit_seconds)
    values: dict[int, Tensor] = {}
    for flat in engine.flats:
        for parameter, view in zip(flat.params, flat.views(flat.full_master()), strict=True):
            values[id(parameter)] = view.clone()
    for name, tensor in state.items():
        if id(tensor) in values:
            state[name] = values[id(tensor)]
        elif isinstance(tensor, Tensor) and not keep_vars:
            state[name] = tensor.detach()
    return state


@torch.no_grad()
def load_tensors(
    engine: Engine, own: Mapping[str, Any], state: Mapping[str, Any], *, strict: bool
) -> _IncompatibleKeys:
    """Fill the owned slices from full tensors by name."""
    engine.check_between_steps(what="load_state_dict")
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    if strict and (missing or unexpected):
        raise InvalidData(f"the state does not fit the model: missing {missing[:3]}, unexpected {unexpected[:3]}")
    # Nothing may still be on its way into what is filled.
    engine.runner.wait_gathers()
    places = {id(p): (flat, index) for flat in engine.flats for index, p in enumerate(flat.params)}
    for name in own:
        if name not in state:
            continue
        target, value = own[name], state[name]
        place = places.get(id(target))
        shape = place[0].layout.shapes[place[1]] if place else tuple(target.shape)
        if tuple(value.shape) != shape:
            raise InvalidData(f"{name} has shape {tuple(value.shape)} in the state, {shape} in the model")
    for name in own:
        if name in state:
            place = places.get(id(own[name]))
            if place:
                place[0].fill(place[1], state[name])
            else:
                own[name].copy_(state[name])
    for unit in engine.runner.units.values():
        unit.refilled()
    return _IncompatibleKeys(missing, unexpected)


def _optimizer_state(engine: Engine, optimizer: Optimizer) -> dict[str, Any]:
    kinds = _state_keys(engine, optimizer)
    state: dict[str, dict[str, Any]] = {}
    for number, flat in enumerate(engine.flats):
        for key in dict.fromkeys(key for (n, _, key) in kinds if n == number):
            whole: list[Tensor] | None = None
            for index, name in enumerate(flat.names):
                if (number, index, key) not in kinds:
                    continue
                kind = kinds[number, index, key]
                if isinstance(kind, torch.dtype):
                    if whole is None:
                        whole = flat.views(_gather_state(flat, optimizer, key=key, dtype=kind))
                    state.setdefault(name, {})[key] = whole[index].clone()
                else:
                    state.setdefault(name, {})[key] = kind
    groups = []
    for group, names in zip(optimizer.param_groups, engine.owned.group_names[optimizer], strict=True):
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": names})
    return {"state": state, "param_groups": groups}


def _state_keys(engine: Engine, optimizer: Optimizer) -> dict[tuple[int, int, str], Any]:
    """(flat, parameter, key) → the dtype of a state that is as large as the parameter, or the value of a scalar.

    A rank knows only the states of what it owns, so the ranks of a shard group tell each other.
    """
    mine: dict[tuple[int, int, str], Any] = {}
    for number, flat in enumerate(engine.flats):
        for part in flat.owned:
            for key, value in optimizer.state.get(part.parameter, {}).items():
                whole = isinstance(value, Tensor) and value.shape == part.parameter.shape and value.dim() > 0
                scalar = value.detach().cpu().clone() if isinstance(value, Tensor) else value
                mine[number, part.index, key] = value.dtype if whole else scalar
    everyone: list[dict[tuple[int, int, str], Any]] = [{} for _ in range(engine.groups.gather.size)]
    dist.all_gather_object(everyone, mine, group=engine.groups.gather.handle)
    return {key: value for theirs in everyone for key, value in theirs.items()}


def _gather_state(flat: FlatParams, optimizer: Optimizer, *, key: str, dtype: torch.dtype) -> Tensor:
    """One kind of state of all of a flat buffer's parameters, in its layout."""
    whole = torch.zeros(flat.layout.num_elements, dtype=dtype, device=flat.device)
    sharded = flat.placement.optim is SHARDED
    mine = own_slice(whole, group=flat.groups.gather) if sharded else whole
    for part in flat.owned:
        value = optimizer.state.get(part.parameter, {}).get(key)
        if value is not None:
            mine[part.start : part.stop].copy_(value.reshape(-1))
    if sharded:
        flat.collectives.all_gather(whole, group=flat.groups.gather).wait()
    return whole


@torch.no_grad()
def _load_optimizer_state(engine: Engine, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    if not engine.owned.adopted(optimizer):
        engine.owned.adopt(optimizer)
    if len(state["param_groups"]) != len(optimizer.param_groups):
        raise InvalidData(
            f"the state has {len(state['param_groups'])} param groups, the optimizer {len(optimizer.param_groups)}"
        )
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    numbers = _keys_of_numbers(engine, state["state"])
    for flat in engine.flats:
        for part in flat.owned:
            saved_state = state["state"].get(flat.names[part.index])
            if saved_state is not None:
                optimizer.state[part.parameter] = {
                    key: _own_part(flat, part.index, value, is_number=key in numbers)
                    for key, value in saved_state.items()
                }


def _keys_of_numbers(engine: Engine, states: Mapping[str, Any]) -> set[str]:
    """The keys under which one number is kept: of a parameter without dimensions every state looks like one."""
    with_dims = {
        name for flat in engine.flats for name, shape in zip(flat.names, flat.layout.shapes, strict=True) if shape
    }
    return {"step"} | {
        key
        for name in with_dims & states.keys()
        for key, value in states[name].items()
        if isinstance(value, Tensor) and value.dim() == 0
    }


def _own_part(flat: FlatParams, index: int, value: Any, *, is_number: bool) -> Any:
    """What this rank keeps of a full state: its slice of a tensor as large as the parameter, all of a number."""
    part = next(part for part in flat.owned if part.index == index)
    if not isinstance(value, Tensor):
        return value
    if is_number or tuple(value.shape) != flat.layout.shapes[index]:
        return value.clone()
    if flat.placement.optim is not SHARDED:
        return value.to(part.parameter.device, copy=True).view_as(part.parameter)
    first = flat.groups.gather.index * flat.layout.slice_elements - flat.layout.offsets[index]
    return value.reshape(-1)[first + part.start : first + part.stop].to(part.parameter.device, copy=True)
