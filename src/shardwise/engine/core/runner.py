"""The runner: what happens in a step → the rows of its program.

It listens to the model's hooks (program/hooks.py) and moves the cursor through the program (program/run.py), whose
rows the executor does on tensors. The first step finds out in which order the units are called (learn.py).
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from shardwise.comm.agreement import meet
from shardwise.comm.rank_progress import BACKWARD, FORWARD, PROGRESS
from shardwise.engine.core import step_errors
from shardwise.engine.core.bucket import ReduceBucket
from shardwise.engine.core.evaluation_gathers import EvaluationGathers
from shardwise.engine.core.executor import EngineExecutor
from shardwise.engine.core.learn import FirstForward, Observation, catch_up, learned
from shardwise.engine.core.pass_state import PassState
from shardwise.engine.core.tape import Tape
from shardwise.engine.core.unit import Unit
from shardwise.engine.core.used import UsedFlags
from shardwise.engine.guards.managed import ManagedParameters
from shardwise.engine.guards.replicas import Replicas
from shardwise.engine.optimizer.matrices import OwnedMatrices
from shardwise.errors import InvalidModel
from shardwise.plan import Plan
from shardwise.program import Bucket, Kind, StepProgram, Trigger, build
from shardwise.program.hooks import StepHooks
from shardwise.program.run import Cursor
from shardwise.spec import ROOT, UNANNOUNCED, ModelSpec


class Runner:
    """One model's steps."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        plan: Plan,
        units: dict[str, Unit],
        make_bucket: Callable[[Bucket], ReduceBucket],
        make_first_forward: Callable[[], FirstForward],
        gather_seen: Callable[[Observation], list[Observation]],
        broadcast_buffers: Callable[[], None],
        flags: UsedFlags,
        passes: PassState,
        land: Callable[[], None],
        managed: ManagedParameters,
        matrices: OwnedMatrices,
        replicas: Replicas,
        tape: Tape,
    ) -> None:
        self.spec, self.plan = spec, plan
        self.units, self.root = units, units[ROOT]
        self.make_bucket, self.make_first_forward, self.gather_seen = make_bucket, make_first_forward, gather_seen
        self.evaluation = EvaluationGathers(flags.groups.gather.log, make_first_forward=make_first_forward)
        self.broadcast_buffers, self.flags, self.passes, self.land = broadcast_buffers, flags, passes, land
        self.managed, self.writes, self.matrices = managed, managed.writes, matrices
        self.replicas, self.tape = replicas, tape
        self.any_sharded = any(unit.sharded for unit in units.values())
        # How long this rank waits for the others where it leaves the program.
        self.limit_seconds = 60.0
        modules = {unit: unit.module for unit in units.values()}
        self.hooks: StepHooks[Unit] = StepHooks(modules, listener=self, on_first_grad=Unit.check_first_grad)
        for unit in units.values():
            unit.grads = self.hooks.grads[unit]
        # Of the spec's own order, until the first step has shown the real one.
        self.follow(build(spec, plan=plan))
        self.learned = False
        # What the ranks saw in the first step.
        self.seen: Sequence[Observation] = ()
        # While the order is learned.
        self.first: FirstForward | None = None
        # (unit, call) of this rank's first forward → which of the program's calls that is.
        self.places: dict[tuple[str, int], int] = {}
        # Forwards since the last backward; whether this backward reduces, or leaves that to a later one.
        self.forwards, self.reduces = 0, True
        # Whether the model itself was called since the last update.
        self.called = False
        # Hooks that refuse gradients, until the first forward brings those that take them.
        self.watch: list[Any] = []

    def follow(self, program: StepProgram) -> None:
        """From here on the steps are this program's."""
        self.executor = EngineExecutor(
            self.units,
            buckets=[self.make_bucket(bucket) for bucket in program.buckets],
            flags=self.flags,
            broadcast_buffers=self.broadcast_buffers,
            serve=self.serve,
            matrices=self.matrices,
            tape=self.tape,
        )
        self.cursor = Cursor(program, self.executor)
        # The same step where its gradients are kept; made when a pass asks for it.
        self._keeping: StepProgram | None = None

    # Forward

    def before_forward(self, unit: Unit) -> int:
        if unit is self.root:
            self._begin()
        if self.first is not None:
            unit.call = self.first.note_call(unit)
            self.first.want(unit)
            self.executor.compute(unit, Kind.FORWARD)
        else:
            unit.call = self.cursor.call_of(unit.name, after=unit.call)
            if not self.cursor.reach(Trigger.BEFORE_FORWARD, unit.name, unit.call):
                self.executor.compute(unit, Kind.FORWARD)
        unit.calls += 1
        return unit.call

    def awaits(self, unit: Unit) -> bool:
        """Where nothing is sharded, only to begin a backward: before autograd adds to averages that `p.grad` shows."""
        is_observed = self.first is not None or self.tape.recording
        return is_observed or self.any_sharded or unit.shows_grads or unit is self.root

    def after_forward(self, unit: Unit, *, backward: str) -> None:
        if backward == UNANNOUNCED and unit.sharded:
            unit.tell_unannounced()
        if self.first is not None:
            self.first.note_backward(unit, backward)
            if unit is not self.root and unit.placement.reshard_after_forward and backward != UNANNOUNCED:
                unit.free()
        elif backward != UNANNOUNCED or self.spec.unit(unit.name).backward == UNANNOUNCED:
            self.cursor.reach(Trigger.AFTER_FORWARD, unit.name, unit.call)

    def without_gradients(self, unit: Unit, *, begins: bool) -> None:
        """No part of a step (evaluation_gathers.py)."""
        if begins:
            self.passes.check_memory("a forward")
            if unit is self.root:
                self.writes.settle()
            self.evaluation.begin(unit)
        else:
            unit.end_backward()

    def serve(self, unit: Unit) -> None:
        """Where the program did not see to it, a unit is gathered now: by all ranks, or not at all."""
        if not unit.whole:
            what = f"a gather of {unit.name} that the first step had no place for (dynamic = true agrees on each)"
            meet(what, limit_seconds=self.limit_seconds)
        unit.ensure()

    def _begin(self) -> None:
        """A new step; whatever the last one left undone (a backward that raised, or none) is dropped."""
        self.passes.check_values("a forward that trains")
        self.evaluation.end()
        if self.hooks.in_backward:
            if not self.executor.can_undo_grads:
                raise step_errors.accumulation_failed()
            self._abandon()
        PROGRESS.phase = FORWARD
        PROGRESS.evaluated = 0
        while self.watch:
            self.watch.pop().remove()
        self.managed.check(thorough=not self.learned)
        self.executor.drop_reduces()
        self.cursor.restart()
        self.places = {}
        self.forwards += 1
        self.called = True
        for unit in self.units.values():
            unit.begin()
        changed = any(unit.grads.expected != unit.learned_trainable for unit in self.units.values())
        if not self.learned or changed or self.plan.dynamic:
            self._forget_program(changed=changed)
            self.broadcast_buffers()

    def _abandon(self) -> None:
        """A backward raised: what it left is part of a gradient."""
        self.executor.drop_reduces()
        self.executor.undo_grads()
        self.hooks.abandon_backward()

    def _forget_program(self, *, changed: bool) -> None:
        """A first step, or parameters were frozen or thawed: the order, and what is reduced, is to be learned."""
        if self.learned and changed:
            if self.executor.holds_grads:
                raise InvalidModel("parameters were frozen or thawed in the middle of an accumulation: do it after it")
            meet("a step before which parameters were frozen or thawed", limit_seconds=self.limit_seconds)
        self.learned = False
        self.first = self.make_first_forward()

    # Backward

    def begin_backward(self) -> None:
        if torch.is_grad_enabled():
            raise InvalidModel("backward(create_graph=True): this engine does not give gradients of gradients")
        # A forward before the last update is torch's own error, if its graph needs what was updated.
        if not self.called and not self.forwards:
            raise step_errors.backward_without_forward()
        PROGRESS.phase = BACKWARD
        if self.first is not None:
            self._learn(self.first)
        self.passes.begin_backward(num_forwards=self.forwards)
        # Buckets that change from step to step hold nothing for the next.
        self.reduces = not self.passes.accumulating or self.plan.accumulate_reduced or self.plan.dynamic
        # Autograd goes back through a forward in reverse, so a unit whose row is passed has all the gradients that it
        # will get; unless two forwards are under way. Where nothing is sharded nobody waits for it.
        in_order = self.any_sharded and self.forwards <= 1
        self.cursor.begin_backward(in_order=in_order, keeping=None if self.reduces else self._keeping_program())
        for unit in self.units.values():
            unit.begin_backward()

    def _keeping_program(self) -> StepProgram:
        if self._keeping is None:
            self._keeping = build(self.spec, plan=self.plan, reduces=False)
        return self._keeping

    def before_backward(self, unit: Unit, call: int) -> None:
        call = self.places.get((unit.name, call), call)
        if not self.cursor.reach(Trigger.BEFORE_BACKWARD, unit.name, call):
            self.executor.compute(unit, Kind.BACKWARD)

    def recompute(self, unit: Unit) -> None:
        if torch.is_grad_enabled() and not unit.calls:
            # Its forward ran without gradients, so nothing of the program knows of it.
            raise step_errors.reentrant_recompute(unit.name)
        self.serve(unit)

    def grads_ready(self, unit: Unit) -> None:
        self.cursor.grads_ready(unit.name)

    def end_backward(self) -> None:
        self.cursor.end_backward()
        for unit in self.units.values():
            unit.free()
        if self.reduces:
            self.flags.settle()
        else:
            self.executor.keep_grads()
        self.land()
        self.forwards = 0
        for unit in self.units.values():
            unit.restore_grads()
            unit.end_backward()

    def forget_grads(self, names: AbstractSet[str], *, drop: bool) -> None:
        """Somebody clears the gradients of these parameters; with `drop`, also those that are reduced."""
        self.executor.forget_grads(names)
        for unit in self.units.values():
            unit.forget_grads(names, drop=drop)
        if self.hooks.in_backward and self.executor.can_undo_grads:
            self._abandon()

    # Update

    def before_step(self) -> None:
        """The update writes into what a gather after the last update may still read."""
        self.passes.check_values("optimizer.step()")
        self.passes.end()
        if self.executor.holds_grads:
            raise step_errors.not_reduced_yet()
        if self.hooks.in_backward:
            raise step_errors.backward_raised()
        self.flags.same_order.look()
        self.cursor.before_step()
        # Also what the program expects a forward to have waited for, if there was none.
        self.wait_gathers()
        self.writes.before_step()
        self.replicas.count_step()
        self.cursor.to_owners()

    def wait_gathers(self) -> None:
        for unit in self.units.values():
            unit.wait_gather()

    def after_step(self) -> None:
        self.called = False
        self.cursor.after_step()
        PROGRESS.end_step()
        torch.autograd.graph.increment_version([p for unit in self.units.values() for p in unit.settled])
        self.writes.settled()

    # The first step

    def _learn(self, first: FirstForward) -> None:
        """The first forward is over on all ranks: its calls are the program's order."""
        self.seen = self.gather_seen(first.end())
        # What was gathered so far the ranks of a group have agreed on, each group by itself.
        self.flags.groups.gather.log.restart()
        program = self.learn_program({name for unit in self.units.values() for name in unit.learn_trained()})
        self.first = None
        self.places = first.places_in(self.spec.call_order)
        catch_up(self.units.values(), program=program, seen=self.seen)
        self.cursor.restart(at=program.first_of_backward)

    def learn_program(self, trainable: AbstractSet[str]) -> StepProgram:
        """Follow the program of what was seen; `trainable`: the parameters that are trained now."""
        sharded = [unit.name for unit in self.units.values() if unit.sharded]
        self.spec = learned(self.spec, seen=self.seen, sharded=sharded, trainable=trainable)
        self.follow(build(self.spec, plan=self.plan))
        self.learned = True
        return self.cursor.program
