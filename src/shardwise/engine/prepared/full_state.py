"""Full state dicts: from slices to unsharded tensors by name, and back."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shardwise.base.errors import InvalidData
from shardwise.base.torch_internals.torch_private import IncompatibleKeys
from shardwise.comm.groups.agreement import meet
from shardwise.engine.core.edited_values import filled
from shardwise.engine.core.step_events import announce
from shardwise.engine.engine import EngineParts
from shardwise.engine.optimizer.allocate import suit_devices
from shardwise.engine.optimizer.unsharded_state import named_states, own_states, unsharded_states


def full_state_dict(
    engine: EngineParts, optimizer: Optimizer | None = None, *, rank0_only: bool = False
) -> dict[str, Any]:
    """Return {"model": names → full tensors, "optimizer": names → full states, and groups}. Collective.

    With `rank0_only`, the other ranks take part and get an empty dict.
    """
    if rank0_only and dist.get_rank() != 0:
        _take_part(engine, optimizer)
        return {}
    state: dict[str, Any] = {"model": dict(engine.core.model.state_dict())}
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(engine, optimizer)
    return state


def _take_part(engine: EngineParts, optimizer: Optimizer | None) -> None:
    """Take part in the collectives of rank 0's state, and keep nothing."""
    _begin_state(engine)
    for flat in engine.core.flats:
        if not flat.holds_all:
            flat.full_master()
    if optimizer is not None:
        engine.owned.adopt_on_all_ranks(optimizer)
        unsharded_states(optimizer, flats=engine.core.flats, matrices=engine.owned.matrices.of(optimizer), keeps=False)


def _begin_state(engine: EngineParts) -> None:
    engine.check_state(what="a state_dict")
    if not engine.holds_all:
        meet("state_dict", limit_seconds=engine.core.followed.limit_seconds)


def load_full_state_dict(
    engine: EngineParts, optimizer: Optimizer | None, state: Mapping[str, Any], *, from_rank0: bool = False
) -> None:
    """Load a state of `full_state_dict`, saved under any plan, engine and number of ranks. Collective.

    `optimizer` may be None: the model alone is loaded. With `from_rank0`, only rank 0's `state` is read.
    """
    check_order(optimizer)
    state = received_state(state, with_optimizer=optimizer is not None, from_rank0=from_rank0)
    engine.core.model.load_state_dict(state["model"])
    if optimizer is not None:
        _load_optimizer_state(engine, optimizer, state["optimizer"])


def check_order(optimizer: object) -> None:
    """Refuse a state that is passed as the optimizer."""
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise InvalidData(
            f"the optimizer is a {type(optimizer).__name__}: call load_full_state_dict(model, optimizer, state), with "
            "None for the optimizer to load the model alone"
        )


def received_state(state: Mapping[str, Any], *, with_optimizer: bool, from_rank0: bool) -> Mapping[str, Any]:
    """Return the state to load, this rank's or rank 0's; refuse other dicts."""
    if from_rank0:
        box = [state if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box, src=0)
        assert box[0] is not None
        state = box[0]
    if "model" not in state or (with_optimizer and "optimizer" not in state):
        raise InvalidData('this is not a state of shardwise.full_state_dict: it must have "model" (and "optimizer")')
    return state


def full_tensors(engine: EngineParts, state: Any, *, keep_vars: bool) -> Any:
    """Replace the parameters in a state dict by their full master values; buffers are detached."""
    _begin_state(engine)
    values: dict[int, Tensor] = {}
    for flat in engine.core.flats:
        for parameter, view in zip(flat.params, flat.full.views_of(flat.full_master()), strict=True):
            values[id(parameter)] = view.clone()
    for name, tensor in state.items():
        if id(tensor) in values:
            state[name] = values[id(tensor)]
        elif isinstance(tensor, Tensor) and not keep_vars:
            state[name] = tensor.detach()
    return state


@torch.no_grad()
def load_tensors(
    engine: EngineParts, own: Mapping[str, Any], state: Mapping[str, Any], *, strict: bool
) -> IncompatibleKeys:
    """Fill the owned slices from full tensors by name."""
    engine.check_between_steps(what="load_state_dict")
    engine.core.setting.passes.check_values("load_state_dict")
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    if strict and (missing or unexpected):
        raise InvalidData(f"the state does not fit the model: missing {missing[:3]}, unexpected {unexpected[:3]}")
    # No gather may still write into the slices, and names that are not in the state keep their values.
    engine.core.wait_gathers()
    announce(engine.core.setting.events.values_read, False)
    places = {id(p): (flat, index) for flat in engine.core.flats for index, p in enumerate(flat.params)}
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
    filled(engine.core)
    return IncompatibleKeys(missing, unexpected)


def _optimizer_state(engine: EngineParts, optimizer: Optimizer) -> dict[str, Any]:
    engine.owned.adopt_on_all_ranks(optimizer)
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": list(names)}
        for group, names in zip(optimizer.param_groups, engine.owned.group_names[optimizer], strict=True)
    ]
    return {
        "state": unsharded_states(optimizer, flats=engine.core.flats, matrices=engine.owned.matrices.of(optimizer)),
        "param_groups": groups,
    }


@torch.no_grad()
def _load_optimizer_state(engine: EngineParts, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    engine.owned.adopt_on_all_ranks(optimizer)
    states = named_states(state, groups=engine.owned.group_names[optimizer])
    own = own_states(states, flats=engine.core.flats, matrices=engine.owned.matrices.of(optimizer))
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    optimizer.state.update(own)
    suit_devices(optimizer, device=engine.core.setting.update_device)
