"""The core: what happens in the steps of a model → the rows of its program.

It listens to the model's hooks (hooks/step_hooks.py) and moves the cursor through the program (program/run.py), whose
rows the executor does on tensors. Which program that is says followed_program.py.

Guards, graphs of units, changes of the plan and the functions for a prepared model use its methods, those of its parts,
and the events (step_events.py).
"""

import sys
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.base.errors import ShardwiseError
from shardwise.base.torch_internals.torch_private import disable_dynamo
from shardwise.comm.groups.rank_progress import BACKWARD, FORWARD, PROGRESS
from shardwise.engine.core import step_errors
from shardwise.engine.core.broadcast import broadcast_buffers
from shardwise.engine.core.core_setting import CoreSetting
from shardwise.engine.core.flat import FlatParams
from shardwise.engine.core.followed_program import FollowedProgram
from shardwise.engine.core.precision import attach_casts
from shardwise.engine.core.second_order import leave_to_autograd
from shardwise.engine.core.step_events import announce
from shardwise.engine.core.step_state import Move, Phase, StepState
from shardwise.engine.core.unit import Unit
from shardwise.engine.hooks.step_hooks import StepHooks
from shardwise.program import Trigger
from shardwise.program.spec import ROOT, UNANNOUNCED, ModelSpec


class Core:
    """Trains one model under one plan. A change of the plan makes another core.

    state      where the step stands
    followed   the program of its steps
    """

    def __init__(self, model: nn.Module, *, units: dict[str, Unit], setting: CoreSetting) -> None:
        self.model, self.units, self.setting = model, units, setting
        self.root = units[ROOT]
        self.state = StepState()
        self.followed = FollowedProgram(units, broadcast_buffers=self._broadcast_buffers, setting=setting)
        self.executor, self.cursor = self.followed.executor, self.followed.cursor
        self.evaluation = self.followed.evaluation
        # In backward the cursor itself is what the hooks call.
        self.before_backward, self.grads_ready = self.cursor.before_backward, self.cursor.grads_ready
        modules = {unit: unit.module for unit in units.values()}
        self.hooks: StepHooks[Unit] = StepHooks(modules, listener=self, on_first_grad=Unit.check_first_grad)
        for unit in units.values():
            is_lent = unit.from_root and unit.sharded
            unit.listen(self.hooks.grads[unit], lend=partial(self._lend, unit) if is_lent else bool)

    @property
    def flats(self) -> list[FlatParams]:
        return [flat for unit in self.units.values() for flat in unit.flats]

    @property
    def in_backward(self) -> bool:
        return self.state.phase is Phase.BACKWARD

    # Attaching

    def attach(self) -> None:
        """Listen to the model."""
        self.hooks.handles.extend(attach_casts(self.model, plan=self.followed.plan))
        self.hooks.attach()
        # After the hook that ends a forward in the usual way: then nothing is left to do.
        self.hooks.handles.append(self.model.register_forward_hook(self._leave_forward, always_call=True))

    # Another program

    def relearn(self, spec: ModelSpec) -> None:
        """Follow a spec whose units hold other buffers: the next step is a first one."""
        # No backward will come of a forward that was computed with the old buffers.
        self.state = StepState()
        self.followed.relearn(spec)

    def resume(self, before: "Core") -> None:
        """Continue where the core of another plan has stopped, between two passes. Both have the same parameters."""
        self.state = before.state
        self.followed.resume(before.followed)

    # Forward

    def before_forward(self, unit: Unit) -> int:
        if unit is self.root:
            self._begin()
        first = self.executor.first
        call = first.note_call(unit) if first else self.cursor.call_of(unit.name, after=unit.last_call)
        self.cursor.before_forward(unit, call)
        unit.note_call(call)
        return call

    def _begin(self) -> None:
        """Begin a step. What the last one left undone (a backward that raised, or none) is dropped."""
        self.setting.passes.check_values("a forward that trains")
        self.evaluation.end()
        if self.in_backward and self.executor.can_undo_grads:
            self._drop_backward()
        begun = self.state.after(Move.FORWARD)
        PROGRESS.phase = FORWARD
        PROGRESS.evaluated = 0
        announce(self.setting.events.pass_begins, self.followed.learned)
        self.executor.drop_reduces()
        self.executor.end_first_forward()
        self.cursor.restart()
        self.state = begun
        for unit in self.units.values():
            unit.begin(continues=begun.forwards > 1)
        self.followed.begin_forward()

    def _broadcast_buffers(self) -> None:
        """Send rank 0's buffers, but not between two forwards of one backward: autograd may have saved the old ones."""
        if self.state.forwards <= 1:
            broadcast_buffers(self.model, setting=self.setting)

    def awaits(self, unit: Unit) -> bool:
        """Return whether to await a unit's backward; without sharding, only to hide averages in `p.grad` from it."""
        is_observed = self.cursor.learns or self.setting.tape.recording
        return is_observed or self.followed.any_sharded or unit.shows_grads or unit is self.root

    def after_forward(self, unit: Unit, *, backward: str) -> None:
        if unit is self.root and not self.state.forwards:
            # Its backward has run inside of it.
            return
        if backward == UNANNOUNCED and unit.sharded and not unit.from_root:
            unit.warn_unannounced()
        spec = self.followed.spec
        if self.executor.first is not None:
            self.executor.first.note_backward(unit, backward)
        elif backward == UNANNOUNCED and spec.unit(unit.name).backward != UNANNOUNCED and unit is not self.root:
            # The program does not expect it: the unit stays gathered until backward is over.
            return
        self.cursor.reach(Trigger.AFTER_FORWARD, unit.name, unit.last_call)
        if unit is self.root:
            self.executor.end_first_forward()

    @disable_dynamo
    def _leave_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Take part in what is left of a forward that has raised: other ranks may wait in a unit that this one skips.

        Ranks that catch the error, all of them or some, have then issued the same. After an error of ours they have not
        come to the same point, and waiting for them may take forever.
        """
        if isinstance(sys.exception(), ShardwiseError):
            return
        if not torch.is_grad_enabled():
            self.without_gradients(self.root, begins=False)
        elif self.state.phase is Phase.FORWARD:
            self.cursor.reach(Trigger.AFTER_FORWARD, ROOT, self.root.last_call)
            self.executor.end_first_forward()

    def announce_loss(self, loss: Tensor) -> None:
        """Let the backward of the forward that has run begin at `loss`, before parameters that only the loss uses."""
        if self.state.forwards and loss.grad_fn is not None:
            self.hooks.announce_outputs(loss, self.root)

    # Outside of inference mode: a tensor that the engine makes here may be written in a later step.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def without_gradients(self, unit: Unit, *, begins: bool) -> None:
        """Begin or end a forward that is no part of a step (evaluation_gathers.py)."""
        if begins:
            self.setting.passes.check_memory("a forward")
            if unit is self.root:
                announce(self.setting.events.evaluation_begins)
            self.evaluation.begin(unit)
        else:
            self.evaluation.end_call(unit)

    def _lend(self, unit: Unit) -> bool:
        """Make a unit out of the root readable outside of its forward, if the root is; return whether that is so.

        As `F.linear(hidden, model.head.weight)` in a fused loss reads a head: in the root it would be there. A read
        before any call is a call of the unit. How backward comes to it is not known, so it stays gathered until
        backward is over. After the first step the program has the call, and gathers ahead of it.
        """
        first = self.executor.first
        if self.in_backward:
            self.followed.serve(unit)
        elif not self.state.forwards:
            return self.evaluation.lend(unit)
        elif first is not None and unit.calls:
            # From now on it stays gathered after the call that it had.
            first.note_backward(unit, UNANNOUNCED)
            first.want(unit)
            self.followed.serve(unit)
        else:
            self.before_forward(unit)
            self.after_forward(unit, backward=UNANNOUNCED)
        return True

    # Backward

    def begin_backward(self) -> None:
        if torch.is_grad_enabled():
            raise step_errors.graph_in_grads()
        begun, passes = self.state.after(Move.BACKWARD), self.setting.passes
        PROGRESS.phase = BACKWARD
        if self.executor.first is not None:
            self.followed.learn(self.executor.first)
        if not passes.accumulating:
            announce(self.setting.events.last_backward_begins)
        # Buckets that change from step to step hold nothing for the next.
        followed, plan = self.followed, self.followed.plan
        reduces = not passes.accumulating or plan.accumulate_reduced or plan.dynamic
        # Autograd goes back through a forward in reverse, so a unit whose row is passed has all the gradients that it
        # will get; unless two forwards are under way, or it has gone back before. Where nothing is sharded no gather
        # waits for it.
        forwards = self.state.forwards
        in_order = forwards == 1 and not passes.by_parts if followed.any_sharded else None
        keeping = None if reduces else partial(followed.build, reduces=False)
        self.cursor.begin_backward(in_order=in_order, keeping=keeping)
        if not forwards:
            followed.gather_again()
        for unit in self.units.values():
            unit.begin_backward()
        self.state = begun

    def before_graph_of_grads(self) -> None:
        leave_to_autograd(self.units.values())

    def recompute(self, unit: Unit) -> None:
        if torch.is_grad_enabled() and not unit.calls:
            # Its forward ran without gradients, so nothing of the program knows of it.
            raise step_errors.reentrant_recompute(unit.name)
        if self.in_backward and not unit.whole:
            self.cursor.before_recompute(unit, calls_of=lambda name: self.units[name].calls)
        self.followed.serve(unit)

    def end_backward(self) -> None:
        self.cursor.end_backward()
        for unit in self.units.values():
            unit.free()
        self.executor.keep_grads() if self.cursor.keeps else self.executor.flags.settle()
        self.setting.land()
        for unit in self.units.values():
            unit.restore_grads()
            unit.end_backward()
        self.state = self.state.after(Move.BACKWARD_ENDS)

    def _drop_backward(self) -> None:
        """Drop what a backward that raised has left: a part of a gradient."""
        self.executor.drop_reduces()
        for unit in self.units.values():
            unit.undo_grads()
        self.hooks.close()
        self.state = self.state.after(Move.DROP)

    def forget_grads(self, names: AbstractSet[str], *, drop: bool) -> None:
        """Clear the gradients of these parameters; with `drop`, also those that are reduced."""
        self.executor.forget_grads(names)
        for unit in self.units.values():
            unit.forget_grads(names, drop=drop)
        if self.in_backward and self.executor.can_undo_grads:
            self._drop_backward()

    # Update

    def before_step(self) -> None:
        """Wait for gathers that may still read what the update writes."""
        events = self.setting.events
        self.setting.passes.check_values("optimizer.step()")
        announce(events.gradients_asked)
        if self.executor.holds_grads:
            raise step_errors.not_reduced_yet()
        self.state.after(Move.UPDATE)
        self.cursor.before_step()
        # Also what the program expects a forward to have waited for, if there was none.
        self.wait_gathers()
        announce(events.update_begins)
        for unit in self.units.values():
            unit.begin_update()
        self.cursor.to_owners()

    def wait_gathers(self) -> None:
        """Wait for everything that is being gathered."""
        for unit in self.units.values():
            unit.wait_gather_slice()
            unit.wait_gather()

    def after_step(self, *, others: AbstractSet[str] = frozenset()) -> None:
        """Let every copy follow the update; `others`: the parameters that only other optimizers step."""
        self.state = self.state.after(Move.UPDATE)
        self.cursor.after_step()
        PROGRESS.end_step()
        torch.autograd.graph.increment_version([p for unit in self.units.values() for p in unit.without(others)])
        announce(self.setting.events.values_written)
