"""The parts of a prepared model: its core, and what is attached to it."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.base.errors import InvalidModel
from shardwise.engine.activations.wrap import wrap_units
from shardwise.engine.carry import find_engine, require_engine
from shardwise.engine.core.core import Core
from shardwise.engine.core.step_events import Tape, announce
from shardwise.engine.fp8.layer_classes import multiply_in_fp8
from shardwise.engine.graphs.unit_graphs import UnitGraphs, unit_graphs_of
from shardwise.engine.guards.guards import Guards
from shardwise.engine.guards.inner_calls import InnerCalls
from shardwise.engine.guards.loading import attach_loads
from shardwise.engine.optimizer.owned import OwnedParameters


@dataclass(kw_only=True, eq=False)
class EngineParts:
    """What the engine of a model is made of; functions for a prepared model (prepared/, plan_change/) take it.

    A new plan replaces the core and the guards, not this object. Every one is an Engine, which has the methods.

    predict    returns each strategy's peak without activations, for out-of-memory errors; None: they have none
    averages   averages of the parameters (prepared/average.py) that are in use
    graphs     units as CUDA graphs (graphs/); None on a CPU, and where the plan says so
    undo       restore the modules' original forward
    """

    core: Core
    guards: Guards
    owned: OwnedParameters
    predict: Callable[..., Mapping[str, int]] | None = None
    averages: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    graphs: UnitGraphs | None = None
    handles: list[Any] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.core.setting.device

    @property
    def holds_all(self) -> bool:
        """Return whether this rank has all values of the model, so that it needs no other rank to read them."""
        return all(flat.holds_all for flat in self.core.flats)

    def attach(self) -> None:
        """Register the hooks on the model."""
        self.core.attach()
        inner = InnerCalls(self.core).attach()
        self.handles = [*multiply_in_fp8(self.core), *attach_loads(self.core), *self.guards.attach(), *inner]

    def wrap(self) -> None:
        """Wrap the units' forwards as the plan says."""
        core = self.core
        self.undo = wrap_units(core.model, units=core.units, plan=core.followed.plan, device=self.device)
        self.graphs = unit_graphs_of(self.core, optimizers=self.owned.group_names)
        if self.graphs is not None:
            # Outermost: a graph contains compiled code and recomputation.
            self.undo += self.graphs.attach()

    def detach(self) -> None:
        """Remove the hooks and restore the modules' original forward."""
        self.core.hooks.detach()
        self.guards.detach()
        for handle in self.handles:
            handle.remove()
        for undo in reversed(self.undo):
            undo()

    def check_between_steps(self, *, what: str) -> None:
        """Refuse `what` in the middle of an accumulation, and where the parameters have other memory."""
        self.core.setting.passes.check_memory(what)
        self.check_reduced(what=what)

    def check_reduced(self, *, what: str) -> None:
        """Refuse `what` in the middle of an accumulation: gradients not reduced yet are not part of any state."""
        if self.core.setting.passes.accumulating or self.core.executor.holds_grads:
            raise InvalidModel(
                f"{what} in the middle of an accumulation: do it after the step, or clear the gradients first "
                "(optimizer.zero_grad())"
            )

    def check_state(self, *, what: str) -> None:
        """Refuse `what` where the parameters are not the model's trained state.

        In the middle of an accumulation they are: only an update changes them.
        """
        self.core.setting.passes.check_memory(what)
        if self.core.followed.plan.updates_in_backward:
            # Ranks that disagree have updated already. On a GPU the flag that tells may still be on its way.
            self.guards.same_order.check(wait=True)
        self.guards.managed.check(thorough=True)
        announce(self.core.setting.events.values_read, False)


def is_prepared(model: nn.Module) -> bool:
    """Return whether this engine runs a model."""
    return isinstance(find_engine(model), EngineParts)


def engine_of(model: nn.Module) -> EngineParts:
    """Return the parts of a model that runs on this engine."""
    parts = require_engine(model)
    if not isinstance(parts, EngineParts):
        raise InvalidModel(f"this {type(model).__name__} runs on engine = 'torch': this takes engine = 'shardwise'")
    return parts


@contextmanager
def tape(model: nn.Module) -> Iterator[Tape]:
    """Record the operations that the model's steps issue; `take()` returns those recorded so far."""
    recorded = engine_of(model).core.setting.tape
    recorded.recording = True
    try:
        yield recorded
    finally:
        recorded.recording = False
