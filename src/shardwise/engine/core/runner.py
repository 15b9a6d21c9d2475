"""The runner: what happens in a step → the rows of its program.

It listens to the model's hooks (program/hooks.py) and moves the cursor through the program (program/run.py), whose
rows the executor does on tensors. The first step finds out in which order the units are called (first_forward.py).
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial

import torch

from shardwise.comm.agreement import distinct, meet
from shardwise.comm.rank_progress import BACKWARD, FORWARD, PROGRESS
from shardwise.engine.core import step_errors
from shardwise.engine.core.broadcast import broadcast_buffers
from shardwise.engine.core.bucket import ReduceBucket
from shardwise.engine.core.core_setting import CoreSetting
from shardwise.engine.core.evaluation_gathers import EvaluationGathers
from shardwise.engine.core.executor import EngineExecutor
from shardwise.engine.core.first_forward import FirstForward, Observation, learned
from shardwise.engine.core.second_order import leave_to_autograd
from shardwise.engine.core.step_events import announce
from shardwise.engine.core.unit import Unit
from shardwise.engine.core.used import UsedFlags
from shardwise.errors import InvalidModel
from shardwise.plan import Plan
from shardwise.program import StepProgram, Trigger, build, context_of
from shardwise.program.hooks import StepHooks, recomputing
from shardwise.program.rules.demand import agreed
from shardwise.program.rules.learning import LEARNING
from shardwise.program.run import Cursor
from shardwise.spec import ROOT, UNANNOUNCED, ModelSpec


class Runner:
    """One model's steps.

    seen             what the ranks saw in the first step
    forwards         forwards since the last backward
    called           whether the model itself was called since the last update
    limit_seconds    how long this rank waits for the others where it leaves the program
    """

    def __init__(self, units: dict[str, Unit], *, setting: CoreSetting) -> None:
        self.units, self.setting = units, setting
        self.spec, self.plan, self.passes = setting.spec, setting.plan, setting.passes
        self.tape, self.events, self.groups = setting.tape, setting.events, setting.groups
        self.root = units[ROOT]
        self.limit_seconds = 60.0
        self.flags = UsedFlags(units.values(), setting=setting)
        self.executor = EngineExecutor(
            units, flags=self.flags, broadcast_buffers=self._broadcast_buffers, serve=self.serve, setting=setting
        )
        self.cursor = Cursor(self.executor)
        self.evaluation = EvaluationGathers(
            self.executor, group=setting.groups.gather, run=self.cursor.run, make_first_forward=self._make_first_forward
        )
        modules = {unit: unit.module for unit in units.values()}
        # In backward the cursor itself is what the hooks call.
        self.before_backward, self.grads_ready = self.cursor.before_backward, self.cursor.grads_ready
        self.before_graph_of_grads = partial(leave_to_autograd, units.values())
        self.hooks: StepHooks[Unit] = StepHooks(modules, listener=self, on_first_grad=Unit.check_first_grad)
        for unit in units.values():
            unit.listen(self.hooks.grads[unit])
        self.seen: Sequence[Observation] = ()
        self.learned, self.forwards, self.called = False, 0, False
        # Whether this backward reduces its gradients, or keeps them for a later one.
        self._reduces = True
        self.follow(setting.spec, plan=setting.plan)

    def follow(self, spec: ModelSpec, *, plan: Plan) -> None:
        """Follow this spec from here on, under this plan of the same placements."""
        self.spec, self.plan = spec, plan
        self.any_sharded = any(unit.sharded for unit in self.units.values())
        self.context = context_of(spec, plan=plan, mesh=self.groups.mesh)
        self.evaluation.follow(self.context, dynamic=plan.dynamic)
        self.cursor.follow(self._build())

    def _build(self, *, reduces: bool = True) -> StepProgram:
        program = build(self.spec, plan=self.plan, mesh=self.groups.mesh, reduces=reduces)
        if reduces:
            self.executor.hold_buckets(
                ReduceBucket(bucket, units=[self.units[name] for name in bucket.units], setting=self.setting)
                for bucket in program.buckets
            )
        return program

    # Forward

    def before_forward(self, unit: Unit) -> int:
        if unit is self.root:
            self._begin()
        first = self.executor.first
        call = first.note_call(unit) if first else self.cursor.call_of(unit.name, after=unit.call)
        self.cursor.before_forward(unit, call)
        unit.note_call(call)
        return call

    @property
    def is_in_step(self) -> bool:
        """Whether a forward has run whose backward is not over."""
        return self.hooks.in_backward or self.forwards > 0

    def _broadcast_buffers(self) -> None:
        """Send rank 0's buffers, but not between two forwards of one backward: autograd may have saved the old ones."""
        if self.forwards <= 1:
            broadcast_buffers(self.root.module, setting=self.setting)

    def awaits(self, unit: Unit) -> bool:
        """Return whether to await a unit's backward; without sharding, only to hide averages in `p.grad` from it."""
        is_observed = self.cursor.learns or self.tape.recording
        return is_observed or self.any_sharded or unit.shows_grads or unit is self.root

    def after_forward(self, unit: Unit, *, backward: str) -> None:
        if unit is self.root and not self.forwards:
            # Its backward has run inside of it.
            return
        if backward == UNANNOUNCED and unit.sharded and not unit.from_root:
            unit.warn_unannounced()
        if self.executor.first is not None:
            self.executor.first.note_backward(unit, backward)
        elif backward == UNANNOUNCED and self.spec.unit(unit.name).backward != UNANNOUNCED and unit is not self.root:
            # The program does not expect it: the unit stays gathered until backward is over.
            return
        self.cursor.reach(Trigger.AFTER_FORWARD, unit.name, unit.call)
        if unit is self.root:
            self.executor.end_first_forward()

    # Outside of inference mode: a tensor that the engine makes here may be written in a later step.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def without_gradients(self, unit: Unit, *, begins: bool) -> None:
        """Begin or end a forward that is no part of a step (evaluation_gathers.py)."""
        if begins:
            self.passes.check_memory("a forward")
            if unit is self.root:
                announce(self.events.evaluation_begins)
            self.evaluation.begin(unit)
        else:
            self.evaluation.end_call(unit)

    def serve(self, unit: Unit) -> None:
        """Gather a unit that the program has not gathered: on all ranks, or not at all."""
        if not unit.whole:
            what = f"a gather of {unit.name} that the first step had no place for (dynamic = true agrees on each)"
            meet(what, limit_seconds=self.limit_seconds)
            self.cursor.run(agreed(unit.name, self.context))
        unit.wait_gather()
        if unit.at_rest:
            unit.wake()

    def _begin(self) -> None:
        """Begin a step. What the last one left undone (a backward that raised, or none) is dropped."""
        self.passes.check_values("a forward that trains")
        self.evaluation.end()
        if self.hooks.in_backward:
            if not self.executor.can_undo_grads:
                raise step_errors.accumulation_failed()
            self._abandon()
        PROGRESS.phase = FORWARD
        PROGRESS.evaluated = 0
        announce(self.events.pass_begins, self.learned)
        self.executor.drop_reduces()
        self.executor.end_first_forward()
        self.cursor.restart()
        self.forwards += 1
        self.called = True
        for unit in self.units.values():
            unit.begin(continues=self.forwards > 1)
        changed = any(unit.grads.expected != unit.learned_trainable for unit in self.units.values())
        if not self.learned or changed or self.plan.dynamic:
            self._learn_again(changed=changed)
        else:
            self.executor.first = None

    def _abandon(self) -> None:
        """Drop what a backward that raised has left: a part of a gradient."""
        self.executor.drop_reduces()
        self.executor.undo_grads()
        self.hooks.abandon_backward()

    def _learn_again(self, *, changed: bool) -> None:
        """Learn the order and what is reduced: in a first step, or after parameters were frozen or thawed."""
        if self.learned and changed:
            if self.executor.holds_grads:
                raise InvalidModel("parameters were frozen or thawed in the middle of an accumulation: do it after it")
            meet("a step before which parameters were frozen or thawed", limit_seconds=self.limit_seconds)
        self.learned = False
        first = self.executor.first = self._make_first_forward(before=self.executor.first)
        # How backward will come to a unit is noted as its forward ends.
        self.cursor.learn(LEARNING, replace(self.context, backward=first.backward))

    def _make_first_forward(self, before: FirstForward | None = None) -> FirstForward:
        words = partial(distinct, group=self.groups.gather)
        return FirstForward(self.units, context=self.context, distinct=words, run=self.cursor.run, before=before)

    # Backward

    def begin_backward(self) -> None:
        if torch.is_grad_enabled():
            raise step_errors.graph_in_grads()
        # A forward before the last update is torch's own error, if its graph needs what was updated.
        if not self.called and not self.forwards:
            raise step_errors.backward_without_forward()
        PROGRESS.phase = BACKWARD
        if self.executor.first is not None:
            self._learn(self.executor.first)
        if not self.passes.accumulating:
            announce(self.events.last_backward_begins)
        # Buckets that change from step to step hold nothing for the next.
        self._reduces = not self.passes.accumulating or self.plan.accumulate_reduced or self.plan.dynamic
        # Autograd goes back through a forward in reverse, so a unit whose row is passed has all the gradients that it
        # will get; unless two forwards are under way. Where nothing is sharded no gather waits for it.
        in_order = self.forwards <= 1 and not self.passes.by_parts if self.any_sharded else None
        self.cursor.begin_backward(
            in_order=in_order, keeping=None if self._reduces else partial(self._build, reduces=False)
        )
        for unit in self.units.values():
            unit.begin_backward()

    def recompute(self, unit: Unit) -> None:
        if torch.is_grad_enabled() and not unit.calls:
            # Its forward ran without gradients, so nothing of the program knows of it.
            raise step_errors.reentrant_recompute(unit.name)
        self.serve(unit)

    def end_backward(self) -> None:
        self.cursor.end_backward()
        for unit in self.units.values():
            unit.free()
        self.flags.settle() if self._reduces else self.executor.keep_grads()
        self.setting.land()
        self.forwards = 0
        for unit in self.units.values():
            unit.restore_grads()
            unit.end_backward()

    def forget_grads(self, names: AbstractSet[str], *, drop: bool) -> None:
        """Clear the gradients of these parameters; with `drop`, also those that are reduced."""
        self.executor.forget_grads(names)
        for unit in self.units.values():
            unit.forget_grads(names, drop=drop)
        if self.hooks.in_backward and self.executor.can_undo_grads:
            self._abandon()

    # Update

    def before_step(self) -> None:
        """Wait for gathers that may still read what the update writes."""
        self.passes.check_values("optimizer.step()")
        announce(self.events.gradients_asked)
        if self.executor.holds_grads:
            raise step_errors.not_reduced_yet()
        if self.hooks.in_backward:
            raise step_errors.step_inside_backward() if recomputing() else step_errors.backward_raised()
        self.cursor.before_step()
        # Also what the program expects a forward to have waited for, if there was none.
        self.wait_gathers()
        announce(self.events.update_begins)
        for unit in self.units.values():
            unit.begin_update()
        self.cursor.to_owners()

    def wait_gathers(self) -> None:
        for unit in self.units.values():
            unit.wait_gather()

    def after_step(self, *, others: AbstractSet[str] = frozenset()) -> None:
        """Let every copy follow the update; `others`: the parameters that only other optimizers step."""
        self.called = False
        self.cursor.after_step()
        PROGRESS.end_step()
        torch.autograd.graph.increment_version([p for unit in self.units.values() for p in unit.without(others)])
        announce(self.events.update_ended)

    # The first step

    def _learn(self, first: FirstForward) -> None:
        """Take the calls of the first forward, which is over on all ranks, as the program's order."""
        self.executor.end_first_forward()
        self.seen = distinct(own := first.end(), text=own.text)
        announce(self.events.order_learned)
        # What was gathered so far the ranks of a group have agreed on, each group by itself.
        self.groups.gather.log.restart()
        self.executor.first = None
        self.learn_program({name for unit in self.units.values() for name in unit.learn_trained()})
        self.cursor.learned(places=first.places_in(self.spec.call_order))
        self.cursor.run(first.catch_up(self.cursor.program, seen=self.seen))

    def learn_program(self, trainable: AbstractSet[str]) -> None:
        """Follow the program of what was seen; `trainable`: the parameters that are trained now."""
        sharded = [unit.name for unit in self.units.values() if unit.sharded]
        spec = learned(self.spec, seen=self.seen, sharded=sharded, trainable=trainable)
        self.follow(spec, plan=self.plan)
        self.learned = True
