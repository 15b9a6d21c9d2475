"""The unsharded state of an optimizer: from the slices of the ranks to full tensors by name, and back.

Two formats can be loaded. torch's: states by number, counting the parameters through the groups in the order in which
the user gave them to the optimizer. Ours (`shardwise.full_state_dict`): states by the parameters' full names.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.base.errors import InvalidData
from shardwise.comm.groups.agreement import exchange
from shardwise.engine.core.flat import FOR_STATE, FlatParams
from shardwise.engine.core.master import Owned
from shardwise.engine.optimizer.matrices import OwnedMatrix

States = Mapping[Any, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Uncut:
    """A tensor that cannot be cut into slices: neither as large as the rank's slice, nor one number."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Laid:
    """A state with one value per element of its parameter, or per block of elements."""

    dtype: torch.dtype
    block: int = 1


@dataclass(frozen=True, slots=True)
class _Shaped:
    """A tensor that an owner sends."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@torch.no_grad()
def unsharded_states(
    optimizer: Optimizer, *, flats: Sequence[FlatParams], matrices: Sequence[OwnedMatrix], keeps: bool = True
) -> dict[str, dict[str, Any]]:
    """Return full states by name, gathered one buffer at a time. Collective, also for a rank that `keeps` nothing."""
    kinds = state_kinds(optimizer, flats=flats)
    states: dict[str, dict[str, Any]] = _sent_by_owners(optimizer, matrices=matrices, keeps=keeps)
    for number, flat in enumerate(flats):
        for key in dict.fromkeys(key for (n, _, key) in kinds if n == number):
            gathered: dict[Laid, Tensor] = {}
            for index, name in enumerate(flat.names):
                if (number, index, key) not in kinds:
                    continue
                kind = kinds[number, index, key]
                if isinstance(kind, Laid):
                    if kind not in gathered:
                        gathered[kind] = _gather_state(flat, optimizer, key=key, kind=kind)
                    if keeps:
                        states.setdefault(name, {})[key] = _cut_state(flat, gathered[kind], index=index, kind=kind)
                elif keeps:
                    states.setdefault(name, {})[key] = kind
    return states


def _sent_by_owners(optimizer: Optimizer, *, matrices: Sequence[OwnedMatrix], keeps: bool) -> dict[str, dict[str, Any]]:
    """Return full states of owned matrices by name, sent by their owners: tensors of any shape, and other values."""
    if not matrices:
        return {}
    held = {
        matrix.name: {
            key: _Shaped(value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else value
            for key, value in optimizer.state.get(matrix.unsharded, {}).items()
        }
        for matrix in matrices
        if matrix.unsharded is not None
    }
    group = matrices[0].flat.groups.gather
    everyone = {name: states for theirs in exchange(held, group=group) for name, states in theirs.items()}
    found: dict[str, dict[str, Any]] = {}
    for matrix in matrices:
        for key, kind in everyone[matrix.name].items():
            if not isinstance(kind, _Shaped):
                if keeps:
                    found.setdefault(matrix.name, {})[key] = kind
                continue
            mine = optimizer.state[matrix.unsharded][key] if matrix.unsharded is not None else None
            device = matrix.flat.device
            sent = torch.empty(kind.shape, dtype=kind.dtype, device=device) if mine is None else mine.to(device)
            sent = sent.contiguous().clone()
            group.log.name = FOR_STATE
            matrix.flat.collectives.broadcast(sent.view(-1), source=matrix.owner, group=group).wait()
            if not keeps:
                continue
            # On the CPU, like the numbers of slices.
            found.setdefault(matrix.name, {})[key] = sent.cpu() if not kind.shape else sent
    return found


def state_kinds(optimizer: Optimizer, *, flats: Sequence[FlatParams]) -> dict[tuple[int, int, str], Any]:
    """Return, by (flat, parameter, key), the layout of a state as large as the parameter, or the value of a number.

    A rank knows only the states of its own slices, so the ranks that hold the others exchange them.
    """
    mine: dict[tuple[int, int, str], Any] = {}
    for number, flat in enumerate(flats):
        for part in flat.master.owned:
            for key, value in optimizer.state.get(part.parameter, {}).items():
                mine[number, part.index, key] = _kind(flat, part, value)
    is_sharded = any(flat.placement.optim.is_sharded for flat in flats)
    crosses = any(flat.placement.optim.is_sharded_across for flat in flats)
    groups = flats[0].groups
    everyone = exchange(mine, group=groups.world if crosses else groups.gather) if is_sharded else [mine]
    kinds: dict[tuple[int, int, str], Any] = {}
    for theirs in everyone:
        for place, kind in theirs.items():
            # For a slice of one element, a state per block looks like one per element.
            if not isinstance(kinds.get(place), Laid) or kinds[place].block == 1:
                kinds[place] = kind
    for (number, index, key), kind in kinds.items():
        if isinstance(kind, _Uncut):
            raise InvalidData(
                f"the optimizer's {key} of {flats[number].names[index]} has shape {kind.shape} on one rank: neither "
                "its slice's nor one number, so it cannot be put together; use strategy = 'ddp' for this optimizer"
            )
    return kinds


def _kind(flat: FlatParams, part: Owned, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == part.parameter.shape and value.dim() > 0:
        return Laid(value.dtype)
    if flat.block > 1 and tuple(value.shape) == (-(-part.parameter.numel() // flat.block),):
        return Laid(value.dtype, flat.block)
    if value.numel() != 1 and flat.placement.optim.is_sharded:
        return _Uncut(tuple(value.shape))
    return value.detach().cpu().clone()


def own_state(flat: FlatParams, optimizer: Optimizer, *, key: str, kind: Laid, into: Tensor | None = None) -> Tensor:
    """Return this rank's part of one kind of state of a flat buffer, laid out like its master."""
    mine = (
        torch.zeros(flat.master.values.numel() // kind.block, dtype=kind.dtype, device=flat.device)
        if into is None
        else into
    )
    for part in flat.master.owned:
        value = optimizer.state.get(part.parameter, {}).get(key)
        # It may be of another kind for another parameter of the buffer.
        if isinstance(value, Tensor) and _kind(flat, part, value) == kind:
            mine[part.start // kind.block : -(-part.stop // kind.block)].copy_(value.reshape(-1))
    return mine


def _gather_state(flat: FlatParams, optimizer: Optimizer, *, key: str, kind: Laid) -> Tensor:
    """Gather one kind of state of all parameters of a flat buffer, in its layout."""
    if not flat.placement.optim.is_sharded:
        return own_state(flat, optimizer, key=key, kind=kind)
    gathered = torch.zeros(flat.layout.num_elements // kind.block, dtype=kind.dtype, device=flat.device)
    part = flat.full.part(flat.placement.optim)
    own = gathered[part.start // kind.block : part.stop // kind.block]
    own_state(flat, optimizer, key=key, kind=kind, into=own)
    flat.gather_parts(gathered)
    return gathered


def _cut_state(flat: FlatParams, gathered: Tensor, *, index: int, kind: Laid) -> Tensor:
    """Return a copy of one parameter's part of a gathered state."""
    if kind.block == 1:
        return flat.full.views_of(gathered)[index].clone()
    start = flat.layout.offsets[index] // kind.block
    return gathered[start : start + -(-prod(flat.layout.shapes[index]) // kind.block)].clone()


def named_states(state: Mapping[str, Any], *, groups: Sequence[Sequence[str]]) -> dict[Any, Mapping[str, Any]]:
    """Return full states by name, from torch's format or ours; refuse a state that does not fit the optimizer.

    `groups`: the full names in each of the optimizer's param groups. States of no parameter keep their key.
    """
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= state.keys():
        raise InvalidData('this is not the state of an optimizer: it must have "state" and "param_groups"')
    if len(state["param_groups"]) != len(groups):
        raise InvalidData(f"the state has {len(state['param_groups'])} param groups, the optimizer {len(groups)}")
    names: dict[Any, str] = {}
    for number, (saved, ours) in enumerate(zip(state["param_groups"], groups, strict=True)):
        names |= _names_in_group(saved["params"], ours, number=number)
    unknown = [key for key in state["state"] if key not in names and isinstance(key, int | str)]
    if unknown:
        raise InvalidData(
            f"the state has {_first(unknown)}, which no param group of it holds; the optimizer begins with "
            f"{_first(name for group in groups for name in group)}"
        )
    return {names.get(key, key): value for key, value in state["state"].items()}


def _names_in_group(saved: Sequence[Any], ours: Sequence[str], *, number: int) -> dict[Any, str]:
    """Return the names of a saved param group's parameters, by number or name in the saved state."""
    if not any(isinstance(key, str) for key in saved):
        if len(saved) != len(ours):
            raise InvalidData(
                f"param group {number} of the state has {len(saved)} parameters, the optimizer's {len(ours)}: save "
                "the state of an optimizer of the same parameters, in the same order"
            )
        return dict(zip(saved, ours, strict=True))
    different = set(saved) ^ set(ours)
    if different:
        name = min(different, key=str)
        where = "state" if name in saved else "optimizer"
        raise InvalidData(f"param group {number} holds {name} only in the {where}: {len(saved)} | {len(ours)} names")
    return {name: name for name in ours}


def _first(names: Iterable[Any]) -> str:
    return next((repr(name) for name in names), "nothing")


@torch.no_grad()
def own_states(
    states: Mapping[Any, Mapping[str, Any]], *, flats: Sequence[FlatParams], matrices: Sequence[OwnedMatrix]
) -> dict[Tensor, dict[str, Any]]:
    """Return this rank's part of full states: those of the slices and of the matrices that it owns."""
    owned = {matrix.name for matrix in matrices}
    of_matrices: dict[Tensor, dict[str, Any]] = {
        matrix.unsharded: {
            key: value.to(matrix.flat.device if value.dim() else value.device, copy=True)
            if isinstance(value, Tensor)
            else value
            for key, value in states[matrix.name].items()
        }
        for matrix in matrices
        if matrix.unsharded is not None and matrix.name in states
    }
    states = {name: state for name, state in states.items() if name not in owned}
    _check_shapes(states, flats=flats)
    numbers = _keys_of_numbers(states, flats=flats)
    return of_matrices | {
        part.parameter: {
            key: _own_part(flat, part, value, is_number=key in numbers)
            for key, value in states[flat.names[part.index]].items()
        }
        for flat in flats
        for part in flat.master.owned
        if flat.names[part.index] in states
    }


def _keys_of_numbers(states: States, *, flats: Sequence[FlatParams]) -> set[str]:
    """Return the keys of states that are one number; every state of a parameter without dimensions looks like one."""
    with_dims = {name for flat in flats for name, shape in zip(flat.names, flat.layout.shapes, strict=True) if shape}
    return {"step"} | {
        key
        for name in with_dims & states.keys()
        for key, value in states[name].items()
        if isinstance(value, Tensor) and value.dim() == 0
    }


def _check_shapes(states: States, *, flats: Sequence[FlatParams]) -> None:
    """Refuse states that cannot be cut, on every rank, including those that own no part of them."""
    for flat in flats:
        if not flat.placement.optim.is_sharded:
            continue
        for name, shape in zip(flat.names, flat.layout.shapes, strict=True):
            for key, value in states.get(name, {}).items():
                known = (shape, (-(-prod(shape) // flat.block),))
                if isinstance(value, Tensor) and value.numel() != 1 and tuple(value.shape) not in known:
                    raise InvalidData(
                        f"{key} of {name} has shape {tuple(value.shape)} in the state, the parameter {shape}: save "
                        "the state with state_dict() of the prepared optimizer, called on every rank"
                    )


def _own_part(flat: FlatParams, part: Owned, value: Any, *, is_number: bool) -> Any:
    """Return this rank's slice of a tensor as large as the parameter; a number as it is."""
    if not isinstance(value, Tensor):
        return value
    shape = flat.layout.shapes[part.index]
    by_block = tuple(value.shape) != shape and tuple(value.shape) == (-(-prod(shape) // flat.block),)
    if is_number or (tuple(value.shape) != shape and not by_block):
        return value.clone()
    if not flat.placement.optim.is_sharded:
        return value.to(part.parameter.device, copy=True).view_as(part.parameter)
    block = flat.block if by_block else 1
    first = flat.full.part(flat.placement.optim).start - flat.layout.offsets[part.index]
    start, stop = (first + part.start) // block, -(-(first + part.stop) // block)
    return value.reshape(-1)[start:stop].to(part.parameter.device, copy=True)
