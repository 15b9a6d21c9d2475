"""Updates inside backward: each flat as soon as its gradients are averaged, which are freed at once."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.base.errors import InvalidModel
from shardwise.engine.core.core import Core
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.master import Owned
from shardwise.engine.core.parameters import parameter_like
from shardwise.engine.optimizer.streamed_update import StreamedUpdate, empty_stand_in, group_numbers, plain_step
from shardwise.program.rules.context import is_in_backward


class BackwardUpdate:
    """Runs the optimizers of a core, part by part. `optimizers`: those that were adopted, by what they step."""

    def __init__(self, core: Core, *, optimizers: Mapping[Optimizer, Any], streamed: StreamedUpdate) -> None:
        self._core, self._optimizers, self._streamed = core, optimizers, streamed
        # Whether a backward has begun since the last step: then units may be of two steps.
        self._has_begun = False
        self._allocated: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        core.setting.events.pass_begins.append(lambda learned: self._allocate())
        core.setting.events.grads_averaged.append(self._update)
        core.setting.events.last_backward_begins.append(self._begin)
        core.setting.events.values_written.append(self._end)
        core.setting.events.values_read.append(lambda announced: self._check_whole())

    def _allocate(self) -> None:
        """Allocate the state on the device before the first forward: in backward it would lie among activations."""
        for optimizer in self._optimizers:
            if optimizer not in self._allocated:
                self._allocated.add(optimizer)
                self._streamed.allocate_others(optimizer)

    def _begin(self) -> None:
        """Refuse what cannot be updated, on all ranks alike, before any unit is."""
        if not any(is_in_backward(self._core.followed.plan, flat.placement) for flat in self._core.flats):
            return
        if not self._optimizers:
            raise InvalidModel("update = 'backward': give shardwise.prepare the optimizer, which updates in backward")
        if self._has_begun:
            raise InvalidModel(
                "update = 'backward': a second backward before optimizer.step(); call it after each backward, and use "
                "shardwise.accumulate for several passes"
            )
        self._has_begun = True

    def _end(self) -> None:
        self._has_begun = False

    @torch.no_grad()
    def _update(self, flat: FlatParams) -> None:
        if self._core.setting.passes.accumulating or not self._is_used(flat):
            # More passes follow, each of which is reduced under dynamic = true. Or another rank may have used the
            # rest, which is known at the end of backward: then optimizer.step() updates it.
            return
        flat.master.writes.before_own()
        for optimizer in self._optimizers:
            stepped = group_numbers(optimizer)
            parts = [
                (part, part.parameter.grad)
                for part in flat.master.owned
                if part.parameter.grad is not None and id(part.parameter) in stepped
            ]
            if parts and flat.master.host is not None:
                self._streamed.update_in_backward(flat, parts, optimizer=optimizer)
            elif parts:
                _step(flat, parts, optimizer=optimizer)
        flat.master.writes.after_own()
        flat.grads.drop(range(len(flat.params)))

    def _check_whole(self) -> None:
        """Refuse to read values between backward and step, or after a backward that failed: units are of two steps."""
        if self._has_begun:
            raise InvalidModel(
                "update = 'backward': some units are updated, and others only by optimizer.step(); call it first, or "
                "resume from an earlier checkpoint if backward has failed"
            )

    def _is_used(self, flat: FlatParams) -> bool:
        """Return whether this rank has used all parameters of a flat's unit."""
        return next(unit for unit in self._core.units.values() if any(flat is one for one in unit.flats)).used_all


def _step(flat: FlatParams, parts: list[tuple[Owned, Tensor]], *, optimizer: Optimizer) -> None:
    """Update parts of a flat where they are."""
    stand_in = empty_stand_in(optimizer)
    number_of = group_numbers(optimizer)
    for part, grad in parts:
        # Between two steps the optimizer's own parameters are guarded, for which torch has no fast kernels.
        plain = parameter_like(part.parameter, flat.master.values[part.start : part.stop])
        plain.grad = grad
        stand_in.param_groups[number_of[id(part.parameter)]]["params"].append(plain)
        # The same dictionary, which the step fills.
        stand_in.state[plain] = optimizer.state[part.parameter]
    plain_step(stand_in)
