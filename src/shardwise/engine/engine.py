"""What `prepare` made of a model; the model carries it."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.comm.collectives import Collectives
from shardwise.comm.groups import MeshGroups
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.precision import attach_casts
from shardwise.engine.core.runner import Runner
from shardwise.engine.core.step_errors import backward_without_forward
from shardwise.engine.core.tape import Tape
from shardwise.engine.guards.first_inputs import FirstInputs
from shardwise.engine.guards.guard import unguarded
from shardwise.engine.optimizer.owned import OwnedParameters
from shardwise.engine.prepared.loading import attach_loads
from shardwise.errors import InvalidModel
from shardwise.plan import Plan


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Engine:
    """The parts of a prepared model. It stays when the plan changes (replan.py); most of its parts do not."""

    groups: MeshGroups
    collectives: Collectives
    flats: list[FlatParams]
    runner: Runner
    inputs: FirstInputs
    owned: OwnedParameters
    tape: Tape
    device: torch.device
    # Every how many steps ranks compare what they hold alike.
    compare_every: int
    handles: list[Any]
    # What puts the modules' own forward back.
    undo: list[Callable[[], None]]
    # How long a rank waits for the others in what users may call on one rank by mistake.
    limit_seconds: float = 60.0
    # Whether nobody but the engine tells what a plan needs when memory runs out (prepared/out_of_memory.py).
    predicts_alone: bool = True
    # What keeps averages of the parameters (prepared/average.py), for as long as somebody else holds it.
    averages: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    # Steps as CUDA graphs, which read and write the memory of this plan (captured/captured_step.py).
    captured: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)

    @property
    def plan(self) -> Plan:
        """The plan that is run: the user's, and what the optimizers' matrices need."""
        return self.runner.plan

    def attach(self, model: nn.Module) -> None:
        """Listen to the model; until its first forward, to gradients that come without one."""
        self.handles = [
            *attach_casts(model, plan=self.plan),
            *attach_loads(model, flats=self.flats),
            *self.inputs.watch(model),
        ]
        self.runner.hooks.attach()
        while self.runner.watch:
            self.runner.watch.pop().remove()
        with unguarded():
            self.runner.watch += [
                parameter.register_post_accumulate_grad_hook(_refuse_grad)  # type: ignore[no-untyped-call]
                for flat in self.flats
                for parameter in flat.params
                if parameter.requires_grad
            ]

    def detach(self) -> None:
        """Listen to the model no more; modules have their own forward again."""
        self.runner.hooks.detach()
        for handle in (*self.handles, *self.runner.watch):
            handle.remove()
        self.runner.watch.clear()
        for undo in reversed(self.undo):
            undo()

    def check_between_steps(self, *, what: str) -> None:
        """Refuse `what` in the middle of an accumulation: gradients that each rank sums alone are part of no state."""
        self.runner.passes.check_memory(what)
        if self.runner.passes.accumulating or self.runner.executor.holds_grads:
            raise InvalidModel(
                f"{what} in the middle of an accumulation: do it after the step, or clear the gradients first "
                "(optimizer.zero_grad())"
            )

    def check_state(self, *, what: str) -> None:
        """Refuse to save what is not the model's state."""
        self.check_between_steps(what=what)
        self.runner.managed.check(thorough=True)


def _refuse_grad(parameter: torch.Tensor) -> None:
    raise backward_without_forward()


# An attribute of the model: a table of engines by model would keep both alive, since an engine holds its model.
_ATTRIBUTE = "_shardwise_engine"


def register(model: nn.Module, engine: Engine) -> None:
    model.__dict__[_ATTRIBUTE] = engine


def unregister(model: nn.Module) -> Engine:
    engine: Engine = model.__dict__.pop(_ATTRIBUTE)
    return engine


def is_prepared(model: nn.Module) -> bool:
    return _ATTRIBUTE in model.__dict__


def engine_of(model: nn.Module) -> Engine:
    """The engine of a prepared model."""
    if not is_prepared(model):
        raise InvalidModel(f"this {type(model).__name__} has not been through shardwise.prepare")
    engine: Engine = model.__dict__[_ATTRIBUTE]
    return engine


@contextmanager
def tape(model: nn.Module) -> Iterator[Tape]:
    """Record the operations that the model's steps issue; `take()` hands out what was recorded so far."""
    recorded = engine_of(model).tape
    recorded.recording = True
    try:
        yield recorded
    finally:
        recorded.recording = False
