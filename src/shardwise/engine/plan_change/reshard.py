"""Moves the buffers of one plan to those of another, one at a time: values, gradients, state and averages.

A rank holds a slice of a buffer or all of it. If both plans cut it into the same slices, each rank copies its own;
otherwise the ranks gather it, and each keeps its new part. The old buffer is freed before the next one is moved, so a
rank holds at most one buffer twice.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.base.errors import InvalidModel
from shardwise.comm.groups.agreement import exchange
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.master import Owned
from shardwise.engine.core.parameters import unguarded
from shardwise.engine.engine import EngineParts
from shardwise.engine.optimizer.unsharded_state import Laid, own_state, state_kinds
from shardwise.plan.placement import Where


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesAndGrads:
    """States and gradients on any rank, besides the parameters.

    kinds      for each optimizer, the kind of each state by (flat, parameter, key)
    counts     for each optimizer, the keys of states that are one number for every parameter
    with_grad  the (flat, parameter) that have a reduced gradient
    """

    kinds: Mapping[Optimizer, Mapping[tuple[int, int, str], Any]]
    counts: Mapping[Optimizer, frozenset[str]]
    with_grad: frozenset[tuple[int, int]]


def states_and_grads(engine: EngineParts) -> StatesAndGrads:
    """Exchange which states and gradients each rank holds. Collective."""
    flats = engine.core.flats
    mine = {
        (number, part.index)
        for number, flat in enumerate(flats)
        for part in flat.master.owned
        if part.parameter.grad is not None
    }
    everyone = exchange(mine)
    with_grad = frozenset(place for theirs in everyone for place in theirs)
    with unguarded():
        for number, index in sorted(with_grad):
            if not flats[number].params[index].requires_grad:
                raise InvalidModel(
                    f"shardwise.replan: {flats[number].names[index]} was frozen while it had a gradient; call "
                    "optimizer.zero_grad() first"
                )
    kinds = {optimizer: state_kinds(optimizer, flats=flats) for optimizer in engine.owned.group_names}
    counts = {
        optimizer: frozenset(
            key
            for (flat, index, key), kind in found.items()
            if flats[flat].layout.shapes[index] and not isinstance(kind, Laid)
        )
        for optimizer, found in kinds.items()
    }
    return StatesAndGrads(kinds=kinds, counts=counts, with_grad=with_grad)


@torch.no_grad()
def move(engine: EngineParts, number: int, new: FlatParams, *, others: StatesAndGrads) -> None:
    """Move all values of a buffer of the engine into `new`, which has the same parameters. Collective."""
    old = engine.core.flats[number]
    new.write_master(_moved(old.master.values, old=old, new=new, where=new.placement.optim))
    for optimizer, kinds in others.kinds.items():
        of_flat = {(index, key): kind for (flat, index, key), kind in kinds.items() if flat == number}
        moving = _MovingState(optimizer, kinds=of_flat, counts=others.counts[optimizer], old=old, new=new)
        states = moving.states()
        for part in old.master.owned:
            optimizer.state.pop(part.parameter, None)
        optimizer.state.update(states)
    for ema in engine.averages:
        average = ema.of_flat(old)
        if average is not None:
            moved = _moved(average, old=old, new=new, where=new.placement.optim)
            ema.replace_buffer(old, new, moved.to(new.master.values.device))
    indices = {index for place, index in others.with_grad if place == number}
    grads = _moved_grads(old=old, new=new) if indices else None
    owned = {part.index: part.parameter for part in new.master.owned}
    engine.owned.replace_slices(
        {name: owned.get(index) for index, name in enumerate(new.names)}, sharded=new.placement.optim.is_sharded
    )
    params = list(old.params)
    old.discard()
    for index, parameter in enumerate(params):
        new.attach(index, parameter)
    if grads is not None:
        new.grads.take_over(grads, indices=indices)


def _moved(mine: Tensor, *, old: FlatParams, new: FlatParams, where: Where) -> Tensor:
    """Return this rank's part of a tensor that is cut like `old`'s master, and is to be sharded so; on the device."""
    was = old.placement.optim
    if old.layout == new.layout and (old.groups.mesh, was) == (new.groups.mesh, where):
        return mine.to(new.device, copy=True)
    unsharded = old.whole_of(mine)
    part = new.full.part(where)
    target = torch.zeros(part.stop - part.start, dtype=mine.dtype, device=new.device)
    for index, start, stop in new.layout.within(part):
        begin = old.layout.offsets[index] + part.start + start - new.layout.offsets[index]
        target[start:stop].copy_(unsharded[begin : begin + stop - start])
    return target


def _moved_grads(*, old: FlatParams, new: FlatParams) -> Tensor:
    """Return the reduced gradients as `new` takes them: unsharded if its gradients are replicated."""
    mine = torch.zeros(old.master.values.numel(), dtype=old.master_dtype, device=old.device)
    for part in old.master.owned:
        grad = part.parameter.grad
        if grad is not None:
            mine[part.start : part.stop].copy_(grad.reshape(-1))
    return _moved(mine, old=old, new=new, where=new.placement.grads)


@dataclass(frozen=True, slots=True)
class _MovingState:
    """The state of one optimizer for one buffer, while it moves. `kinds`: by (parameter, key)."""

    optimizer: Optimizer
    _: KW_ONLY
    kinds: Mapping[tuple[int, str], Any]
    counts: frozenset[str]
    old: FlatParams
    new: FlatParams

    def states(self) -> dict[Tensor, dict[str, Any]]:
        """Return the state of each part that this rank will own; the old state is freed key by key."""
        states: dict[Tensor, dict[str, Any]] = {}
        for key in dict.fromkeys(key for _, key in self.kinds):
            moved = self._moved(key)
            for part in self.new.master.owned:
                if (part.index, key) in self.kinds:
                    states.setdefault(part.parameter, {})[key] = self._value(part, key, moved)
        return states

    def _moved(self, key: str) -> Tensor | None:
        """Return one kind of state, cut like the new master; None if it is one number per parameter."""
        laid = next((kind for (_, other), kind in self.kinds.items() if other == key and isinstance(kind, Laid)), None)
        if laid is None:
            return None
        mine, where = own_state(self.old, self.optimizer, key=key, kind=laid), self.new.placement.optim
        moved = _moved(mine, old=self.old, new=self.new, where=where)
        for part in self.old.master.owned:
            if isinstance(self.kinds.get((part.index, key)), Laid):
                self.optimizer.state.get(part.parameter, {}).pop(key, None)
        return moved

    def _value(self, part: Owned, key: str, moved: Tensor | None) -> Any:
        kind, device = self.kinds[part.index, key], part.parameter.device
        if isinstance(kind, Laid):
            assert moved is not None
            return moved[part.start : part.stop].to(device, copy=True).view_as(part.parameter)
        if not isinstance(kind, Tensor):
            return kind
        if key not in self.counts and kind.numel() == 1:
            # A parameter without dimensions.
            return kind.to(device, copy=True).view_as(part.parameter)
        return kind.clone()
