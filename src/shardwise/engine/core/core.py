"""The core as everything else sees it: a model's units, its steps, and what may be asked of both.

Guards, captured steps, changes of the plan and the functions for a prepared model use these methods and the events
(step_events.py). How a step is run (runner.py) is the core's own.
"""

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.core.bucket import ReduceBucket
from shardwise.engine.core.core_setting import CoreSetting
from shardwise.engine.core.evaluation_gathers import EvaluationGathers
from shardwise.engine.core.executor import MakeAction
from shardwise.engine.core.flat import FlatParams, refresh
from shardwise.engine.core.part_calls import PartCalls
from shardwise.engine.core.pass_state import PassState
from shardwise.engine.core.precision import attach_casts
from shardwise.engine.core.root_reads import lend
from shardwise.engine.core.runner import Runner
from shardwise.engine.core.step_events import StepEvents, announce
from shardwise.engine.core.unit import Unit
from shardwise.engine.core.used import FlagRider
from shardwise.engine.fp8.layer_classes import multiply_in_fp8
from shardwise.plan import Plan
from shardwise.plan.placement import SHARDED
from shardwise.program import Kind, Operation, Row, StepProgram, Trigger
from shardwise.program.rules.demand import edited, released
from shardwise.spec import ROOT, ModelSpec


class Core:
    """Trains one model under one plan. A change of the plan makes another core."""

    def __init__(self, model: nn.Module, *, units: dict[str, Unit], setting: CoreSetting) -> None:
        self.model, self.units, self.setting = model, units, setting
        self._runner = Runner(units, setting=setting)
        for unit in units.values():
            if unit.from_root and unit.sharded:
                unit.lend_by(partial(lend, self._runner, unit))
        self._handles: list[Any] = []
        self._undo: list[Callable[[], None]] = []

    # What it is

    @property
    def plan(self) -> Plan:
        """The plan that is run: the user's, with the matrices that optimizers need unsharded."""
        return self._runner.plan

    @property
    def spec(self) -> ModelSpec:
        """The spec as the steps have shown it."""
        return self._runner.spec

    @property
    def program(self) -> StepProgram:
        return self._runner.cursor.program

    @property
    def flats(self) -> list[FlatParams]:
        return [flat for unit in self.units.values() for flat in unit.flats]

    @property
    def events(self) -> StepEvents:
        return self.setting.events

    @property
    def passes(self) -> PassState:
        return self.setting.passes

    @property
    def evaluation(self) -> EvaluationGathers:
        return self._runner.evaluation

    @property
    def buckets(self) -> dict[str, ReduceBucket]:
        return self._runner.executor.buckets

    @property
    def flags(self) -> Tensor:
        """The flags of used parameters."""
        return self._runner.flags.flags

    @property
    def any_sharded(self) -> bool:
        """Whether parameters of any unit are sharded."""
        return self._runner.any_sharded

    @property
    def generates_together(self) -> bool:
        """Whether a rank that is done with its part of an evaluation has to continue until all ranks are."""
        return self.any_sharded and self.evaluation.agreed is None

    @property
    def limit_seconds(self) -> float:
        """Seconds that this rank waits for the others where it leaves the program."""
        return self._runner.limit_seconds

    @limit_seconds.setter
    def limit_seconds(self, seconds: float) -> None:
        self._runner.limit_seconds = seconds

    # Where it stands

    @property
    def learned(self) -> bool:
        """Whether the order of the units is known."""
        return self._runner.learned

    @property
    def is_in_step(self) -> bool:
        """Whether a forward has run whose backward is not over."""
        return self._runner.is_in_step

    @property
    def holds_grads(self) -> bool:
        """Whether gradients are summed on this rank alone, for a later backward to reduce."""
        return self._runner.executor.holds_grads

    def upcoming(self, *, restarts: bool) -> tuple[Operation, ...]:
        """Return the operations of the next row of the program; with `restarts`, of a new step."""
        return self._runner.cursor.upcoming(restarts=restarts)

    # Attaching

    def attach(self) -> None:
        """Listen to the model."""
        self._handles = attach_casts(self.model, plan=self.plan)
        self._multiply_in_fp8()
        self._runner.hooks.attach()

    def _multiply_in_fp8(self) -> None:
        self._multiply_as_before()
        gathered = {
            flat.names[index]: (weight, self._runner.executor.scales.inverses[flat.names[index]])
            for flat in self.flats
            if flat.full.fp8 is not None
            for index, weight in flat.full.fp8.weights.items()
        }
        self._undo = multiply_in_fp8(self.model, spec=self.spec, plan=self.plan, gathered=gathered)

    def _multiply_as_before(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    def detach(self) -> None:
        """Listen to the model no more."""
        self._runner.hooks.detach()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._multiply_as_before()

    @property
    def handles(self) -> list[Any]:
        """The hooks on the model's modules."""
        return [*self._handles, *self._runner.hooks.handles]

    def add_operation(self, kind: Kind, make_action: MakeAction) -> None:
        """Run operations of a kind that the core does not know."""
        self._runner.executor.others[kind] = make_action

    def carry(self, rider: FlagRider) -> None:
        """Let `rider` use the first flag of used parameters."""
        self._runner.flags.carry(rider)

    def calls_of_parts(self) -> AbstractContextManager[None]:
        """Let code that runs backward by itself call parts of the model, inside a block."""
        return PartCalls(self._runner).watched()

    def announce(self, loss: Tensor) -> None:
        """Let the backward of the forward that has run begin at `loss`, before parameters that only the loss uses."""
        if self._runner.forwards and loss.grad_fn is not None:
            self._runner.hooks.announce_outputs(loss, self._runner.root)

    # Around an update

    def before_step(self) -> None:
        self._runner.before_step()

    def after_step(self, *, others: AbstractSet[str] = frozenset()) -> None:
        self._runner.after_step(others=others)

    def wait_gathers(self) -> None:
        """Wait for everything that is being gathered."""
        self._runner.wait_gathers()

    def without_gradients(self, unit: Unit, *, begins: bool) -> None:
        """Begin or end a forward of a unit under no_grad that its own hooks do not see."""
        self._runner.without_gradients(unit, begins=begins)
        if begins:
            self.evaluation.leave_order()

    def land(self) -> None:
        """Wait for gradients that are on their way to host memory."""
        self.setting.land()

    def forget_grads(self, names: AbstractSet[str], *, drop: bool) -> None:
        """Clear the gradients of these parameters; with `drop`, also those that are reduced."""
        self._runner.forget_grads(names, drop=drop)

    def broadcast_buffers(self) -> None:
        """Take the model's buffers from the rank whose buffers count. Collective."""
        runner = self._runner
        runner.cursor.run(Row(trigger=Trigger.DEMANDED, unit=ROOT, call=0, operations=runner.context.broadcasts))

    # Values and gradients outside of a step

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Let every copy on every rank follow what is written into owned slices in here. Collective."""
        self.wait_gathers()
        announce(self.events.values_read, False)
        yield
        announce(self.events.values_read, True)
        self.distribute()

    @torch.no_grad()
    def distribute(self) -> None:
        """Owned slices have new values: every copy follows. Collective.

        A backward through an earlier forward is torch's error, as after an update.
        """
        runner = self._runner
        announce(self.events.values_replaced)
        for flat in self.flats:
            flat.master.stage()
        runner.cursor.run(edited(runner.context))
        replicated = [flat for flat in self.flats if flat.placement.params is not SHARDED]
        refresh([flat for flat in replicated if flat.placement.optim is not SHARDED])
        torch.autograd.graph.increment_version([p for unit in self.units.values() for p in unit.params()])
        announce(self.events.values_written)

    def filled(self) -> None:
        """Masters were filled, and with them replicated parameters: what is gathered is old. Local to this rank."""
        announce(self.events.values_replaced)
        for flat in self.flats:
            flat.master.stage()
        for name, unit in self.units.items():
            if unit.sharded:
                self._runner.cursor.run(released(name))
        announce(self.events.values_written)

    def take_held(self) -> dict[int, Tensor]:
        """Parameter, by id → what this rank has summed of its gradients for a later backward to reduce.

        The buckets are given up.
        """
        return self._runner.executor.take_held()

    def hold(self, held: dict[int, Tensor]) -> None:
        """Take over sums that another core has held."""
        self._runner.executor.hold(held)

    # A step that does not go as usual

    def abandon_captured(self) -> None:
        """Stand as before a step that broke off while it was captured, of which nothing was computed.

        Collectives that were captured never run, so nothing may wait for them; what was gathered lies in a graph's
        memory. Parameters and optimizer state were not touched: a replay would have computed their update.
        """
        runner = self._runner
        for unit in self.units.values():
            unit.abandon()
        for bucket in self.buckets.values():
            bucket.abandon()
        runner.flags.abandon()
        runner.hooks.abandon_backward()
        runner.forwards, runner.called = 0, False

    # Another program

    def follow_plan(self, plan: Plan) -> None:
        """Follow the program of another plan of the same placements and buffers."""
        self._runner.follow(self.spec, plan=plan)

    def relearn(self, spec: ModelSpec) -> None:
        """Follow a spec whose units hold other buffers: the next step is a first one."""
        self._runner.learned = False
        # No backward will come of a forward that was computed with the old buffers.
        self._runner.forwards = 0
        self._runner.flags.cover()
        self._runner.executor.cover_scales()
        self._runner.follow(spec, plan=self.plan)
        self._multiply_in_fp8()

    def resume(self, before: "Core") -> None:
        """Continue where the core of another plan has stopped, between two passes. Both have the same parameters."""
        runner, old = self._runner, before._runner
        runner.called, runner.limit_seconds = old.called, old.limit_seconds
        if not old.learned or self.plan.dynamic:
            return
        runner.seen = old.seen
        trainable: set[str] = set()
        for name, unit in self.units.items():
            trainable |= unit.resume(before.units[name])
        runner.learn_program(trainable)
