"""An optimizer that steps what the rank owns.

Its param groups are rewritten in place: the module's parameters go, the owned slices come. Around its step the core
waits for what the update writes into, and lets every copy follow afterwards. With a closure, gradients come inside the
step, so what precedes an update follows on the closure.
"""

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.base.errors import InvalidModel
from shardwise.base.torch_internals.torch_private import disable_dynamo
from shardwise.comm.groups.rank_progress import PROGRESS, UPDATE
from shardwise.engine.core.core import Core
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.step_errors import frozen_has_gradient


class StepClosure:
    """A step of one optimizer, with a closure or without: `ready` is called once the gradients are there.

    A subclass whose step calls its parent's has steps inside a step, and torch calls the hooks of each.
    """

    def __init__(self, ready: Callable[[], None]) -> None:
        self._ready = ready
        self._is_ready = True
        # Steps that began and did not end, which those that raised never do.
        self._depth = 0

    def begin(
        self, arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of a step (the optimizer is the first), to be used in place of those given.

        None for a step inside another one.
        """
        if self._depth and _is_inside_step(arguments[0]):
            self._depth += 1
            return None
        self._depth = 1
        self._is_ready = True
        closure = options["closure"] if "closure" in options else arguments[1] if len(arguments) > 1 else None
        if not callable(closure):
            self._ready()
            return tuple(arguments), dict(options)
        self._is_ready = False

        def then_ready() -> Any:
            loss = closure()
            with torch.no_grad():
                self._ready()
            self._is_ready = True
            return loss

        if "closure" in options:
            return tuple(arguments), {**options, "closure": then_ready}
        return (arguments[0], then_ready, *arguments[2:]), dict(options)

    def end(self, optimizer: Optimizer) -> bool:
        """End a step. Returns False for a step inside another one."""
        if self._depth > 1 and _is_inside_step(optimizer):
            self._depth -= 1
            return False
        self._depth = 0
        return True

    def check(self) -> None:
        """Refuse a step that did not call its closure."""
        if not self._is_ready:
            self._is_ready = True
            raise InvalidModel(
                "optimizer.step(closure): this optimizer did not call the closure; call step() without one"
            )


def _is_inside_step(optimizer: Optimizer) -> bool:
    """Return whether a step's hook is called by a step inside another one of the same optimizer.

    By the stack, down from the hook to the outer step. Called only after a step that began and did not end: its hooks
    cannot show whether it still runs or has raised.
    """
    frame: FrameType | None = sys._getframe(1)
    num_steps = 0
    while frame is not None and num_steps < 2:
        is_step = frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == "torch.optim.optimizer"
        num_steps += is_step and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return num_steps > 1


class OptimizerSlices:
    """Maps parameters to the slices that stand for them, and acts before and after a step.

    core          another one after a change of the plan
    group_names   the full names of each param group, also of what this rank owns nothing of
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        self._owned: dict[int, nn.Parameter | None] = {}
        self._names: dict[int, str] = {}
        # Held, so that an id stays that of its parameter.
        self._known: list[nn.Parameter] = []
        self.group_names: weakref.WeakKeyDictionary[Optimizer, list[list[str]]] = weakref.WeakKeyDictionary()

    def cover(self, flat: FlatParams, index: int, parameter: nn.Parameter) -> None:
        """`parameter` is stepped as the part of it that this rank owns, if it owns any."""
        self._known.append(parameter)
        self._names[id(parameter)] = flat.names[index]
        owned = (part.parameter for part in flat.master.owned if part.index == index)
        self._owned[id(parameter)] = next(owned, None)

    def adopted(self, optimizer: Optimizer) -> bool:
        return optimizer in self.group_names

    def adopt(self, optimizer: Optimizer) -> None:
        """Rewrite the param groups; their options, and whoever holds them (schedulers), stay."""
        self.group_names[optimizer] = []
        for group in optimizer.param_groups:
            self._rewrite(group, optimizer=optimizer)
        held_weakly = weakref.ref(optimizer)
        closure = StepClosure(lambda: self.before_step(held_weakly()))

        # torch.compile(optimizer.step) compiles the update, not what is around it.
        @disable_dynamo
        def begin(one: Optimizer, *given: Any) -> Any:
            return closure.begin(*given)

        @disable_dynamo
        def end(one: Optimizer, *_: Any) -> None:
            if closure.end(one):
                self._end_step(one, closure)

        optimizer.register_step_pre_hook(begin)
        optimizer.register_step_post_hook(end)
        optimizer.zero_grad = partial(self._zero_grad, held_weakly)  # type: ignore[method-assign]

    def _rewrite(self, group: dict[str, Any], *, optimizer: Optimizer) -> None:
        """Replace the parameters of a new param group by what is stepped for them here."""
        names = [self._names[id(parameter)] for parameter in group["params"]]
        self.group_names[optimizer].append(names)
        stepped = self._stepped_for(group["params"], names=names, optimizer=optimizer)
        group["params"][:] = [parameter for parameter in stepped if parameter is not None]

    def _stepped_for(
        self, parameters: list[nn.Parameter], *, names: list[str], optimizer: Optimizer
    ) -> list[nn.Parameter | None]:
        """Return what is stepped for each parameter on this rank; None for nothing."""
        return [self._owned[id(parameter)] for parameter in parameters]

    def _zero_grad(self, held: "weakref.ref[Optimizer]", set_to_none: bool = True) -> None:
        """Clear the optimizer's own gradients, those of an accumulation, and `p.grad` of the model."""
        optimizer = held()
        assert optimizer is not None
        type(optimizer).zero_grad(optimizer, set_to_none)
        names = {name for group in self.group_names[optimizer] for name in group}
        self.core.forget_grads(names, drop=set_to_none)

    def before_step(self, optimizer: Optimizer | None) -> None:
        """Prepare for the update: the gradients are there."""
        if optimizer is not None:
            self._refuse_frozen(optimizer)
        self.core.before_step()
        PROGRESS.phase = UPDATE

    def _refuse_frozen(self, optimizer: Optimizer) -> None:
        """Refuse to step what is frozen where its slices would not be gathered; on all ranks, whatever each owns."""
        units = (unit for unit in self.core.units.values() if unit.updates_parts)
        frozen = [
            flat for unit in units for flat in unit.flats if flat.spec.has_gradients and flat not in unit.trained_flats
        ]
        names = {name for group in self.group_names[optimizer] for name in group} if frozen else set()
        for flat in frozen:
            for index, name in enumerate(flat.names):
                if name in names and flat.grads.is_stepped(index):
                    raise frozen_has_gradient(name)

    def _end_step(self, optimizer: Optimizer, closure: StepClosure) -> None:
        closure.check()
        others: set[str] = set()
        if len(self.group_names) > 1:
            others = {name for groups in self.group_names.values() for names in groups for name in names}
            others.difference_update(name for names in self.group_names[optimizer] for name in names)
        self.core.after_step(others=others)
